"""The seam for whoever brings parts of the cache from elsewhere, or takes them there.

A connector lives in the engine's thread. It never waits: what takes time goes on behind it, and
`poll` tells what came of it. Blocks that others read or write are kept from being reused by
`BlockPool.hold(key, blocks)` and given back by `drop(key)`, no matter what the engine does with
their request meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from kvx_reference.engine.cache import BlockPool, KvCache
from kvx_reference.engine.config import ModelConfig
from kvx_reference.engine.request import Request, Scheduled


class ConnectorError(Exception):
    """A connector cannot work as it is configured; the text says why."""


@frozen(eq=False)
class Parts:
    """What a connector gets of the engine it serves."""

    config: ModelConfig
    cache: KvCache
    pool: BlockPool


@frozen
class Loads:
    """Requests whose load is over, by id; `failed` ones with the reason."""

    done: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


class Connector(Protocol):
    """What the engine tells a connector, and asks it."""

    def on_request(self, request: Request) -> None:
        """A request was accepted; it may wait for long."""
        ...

    def external_tokens(self, request: Request, computed: int) -> int:
        """How many known tokens behind the first `computed` ones can be loaded. Asked again until blocks are found."""
        ...

    def allocated(self, request: Request, external: int) -> None:
        """The request has its blocks; the load of `external` tokens begins now (0: none is needed).

        A load is answered by `poll`, unless its request is finished before.
        """
        ...

    def preempted(self, request: Request) -> None:
        """The request loses its blocks after this call and will be computed again."""
        ...

    def layer_computed(self, layer: int, step: Sequence[Scheduled]) -> None:
        """The layer's keys and values of this step stand in the cache; later layers are still computed."""
        ...

    def step_done(self, step: Sequence[Scheduled]) -> None:
        """All layers are computed; `Request.computed` still says what was before the step."""
        ...

    def starving(self) -> None:
        """Requests wait, and a step computed nothing for want of blocks: let go of what can be let go."""
        ...

    def finished(self, request: Request, *, completed: bool) -> Mapping[str, Any] | None:
        """The request loses its blocks after this call. The answer's transfer parameters.

        `completed`: it ended as it was asked to, not by an abort or an error.
        """
        ...

    def poll(self) -> Loads:
        """What came of loads since the last call; gives released blocks back too."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `poll` has to be called although no request runs."""
        ...

    def close(self) -> None: ...


ConnectorFactory = Callable[[Parts, Mapping[str, Any]], Connector]
"""Called once with the engine's parts and the options of the command line. Raises ConnectorError."""
