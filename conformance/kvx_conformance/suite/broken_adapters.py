"""Adapters that are broken on purpose: what the cases of an adapter are tested with.

Each is the reference engine's, started by its own driver; what its adapter tells kvx and hears from it is bent by
`kvx_conformance.suite.broken_server`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from kvx import plugins
from kvx.core.model import Mode
from kvx.driver import EngineDriver, Launch, Server
from kvx_conformance.suite.broken import Broken
from kvx_conformance.suite.broken_server import BENDS
from kvx_conformance.suite.subject import Subject

ENGINE = "reference"


class Bends:
    """The engine's driver, whose servers with kvx have one bend; all else is as its own says."""

    def __init__(self, bend: str) -> None:
        self._bend = bend
        self._driver: EngineDriver = plugins.load().driver(ENGINE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError where the server cannot be started so."""
        launch = self._driver.launch(server)
        python, flag, *rest = launch.command
        assert (python, flag) == (sys.executable, "-m")
        command = (python, "-m", "kvx_conformance.suite.broken_server", self._bend, *rest)
        return evolve(launch, command=command) if server.options is not None else launch


class Roles(Bends):
    """The same of an engine whose servers have roles: none is asked to serve alone."""

    @property
    def has_roles(self) -> bool:
        return True


ROLES = "_with_roles"
"""The end of the names of those."""


def __getattr__(name: str) -> Callable[[], Bends]:
    """A driver's factory for each bend, as `kvx_conformance.suite.broken_adapters:NAME`."""
    bend = name.removesuffix(ROLES)
    if bend not in BENDS:
        raise AttributeError(name)
    return partial(Bends if bend == name else Roles, bend)


def _broken(name: str, cause: str, *found_by: str, proves: Sequence[str] = ()) -> tuple[str, Broken]:
    return name, Broken(Subject("tcp", engine=f"{__name__}:{name}"), cause, found_by, tuple(proves))


def _modes(*cases: str) -> list[str]:
    """Of each the case of either mode."""
    return [f"{case}-{mode.value}" for case in cases for mode in Mode]


CORRECT_ADAPTERS: Mapping[str, Subject] = {
    ENGINE: Subject("tcp", engine=ENGINE),
    f"straight{ROLES}": Subject("tcp", engine=f"{__name__}:straight{ROLES}"),
}

BROKEN_ADAPTERS: Mapping[str, Broken] = dict(
    (
        _broken("calls_failures_good", "It tells its engine that a failed load is done.", "KVX-ADP-003.prefill-killed"),
        _broken("forgets_failures", "It never tells its engine that a load has failed.", "KVX-ADP-003.prefill-killed"),
        _broken(
            "keeps_released",
            "It keeps blocks that kvx has released.",
            "KVX-ADP-006.mixed",
            proves=_modes(*(f"KVX-ADP-002.client-leaves-{when}" for when in ("early", "queued", "decoding"))),
        ),
        _broken("frees_on_abort", "It gives blocks back when it aborts, before Released.", "KVX-ADP-008.late-write"),
        _broken("keeps_aborted", "It keeps the blocks of what it aborts.", "KVX-ADP-002.client-leaves-early-push"),
        _broken("never_ends_a_push", "It never hands over the last part of a push.", "KVX-ADP-004.decode"),
        _broken(
            "turns_blocks_round",
            "It hands over blocks in the wrong order.",
            "KVX-ADP-001.tokens",
            proves=_modes("KVX-ADP-001.beginnings", "KVX-ADP-007.drained"),
        ),
        _broken(
            "mistakes_its_layout",
            "It tells in the wrong order what lies in a block.",
            "KVX-ADP-009.unlike-p",
            proves=_modes("KVX-ADP-009.unlike-decode"),
        ),
        _broken("rounds_the_cache", "It changes what has come, too little for the tokens.", "KVX-ADP-010.bytes"),
        _broken(
            "dies_of_failures",
            "A failed transfer ends its engine.",
            "KVX-ADP-002.client-leaves-pu",
            proves=_modes("KVX-ADP-002.client-leaves"),
        ),
        _broken(
            "stumbles_over_its_predecessor",
            "It does not start where a killed server has left its file.",
            "KVX-ADP-004.prefill-restarted",
            proves=_modes("KVX-ADP-004.prefill-restarted", "KVX-ADP-004.decode-restarted"),
        ),
        _broken(
            "takes_two_at_once",
            "It withdraws what it would have beside two other transfers.",
            "KVX-ADP-005.queue",
            proves=_modes("KVX-ADP-005.queue"),
        ),
        _broken(
            f"turns_blocks_round{ROLES}",
            "Its servers have roles, and it hands over blocks in the wrong order.",
            "KVX-ADP-007.drained-roles",
            proves=_modes("KVX-ADP-007.drained-roles"),
        ),
    )
)
"""By name; `found_by` are cases that have to find each."""
