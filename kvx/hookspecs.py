"""The seven hooks of kvx. Their docstrings are the contract.

A plugin is a module named by an entry point of the group `kvx`; its functions are marked with
`hookimpl`. Importing it may cost nothing but the standard library and kvx: engines load it in
each of their processes, so what is heavy is imported inside the factory that needs it. Hooks are
called per process or per transfer, never per block, layer or step. Plugins are asked in the
order of their names; one that raises is reported and left out, the others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:  # a plugin's module imports this one, and shall cost its host next to nothing
    from collections.abc import Iterable, Mapping

    from kvx.checks import Check
    from kvx.core.model import InstanceInfo, Mode, Outcome
    from kvx.drift import Adapter
    from kvx.driver import EngineDriver, RequestInfo
    from kvx.transport import TransportFactory

hookspec = pluggy.HookspecMarker("kvx")
hookimpl = pluggy.HookimplMarker("kvx")


@hookspec
def kvx_transports() -> Mapping[str, TransportFactory]:  # type: ignore[empty-body]
    """Transports of this plugin, by name.

    Called once per process. Each name is the plugin's entry point, or that with `-VARIANT` after
    it (`nixl-ucx`). A factory is called once per rank, and only for a transport that the
    configuration names; it raises TransportError, ConfigError or ImportError when it cannot work.
    """


@hookspec
def kvx_drivers() -> Mapping[str, EngineDriver]:  # type: ignore[empty-body]
    """Engines that this plugin can start and talk to, by name.

    Called once per process, by commands that start or inspect engines; never inside an engine.
    """


@hookspec
def kvx_interfaces() -> Mapping[str, Adapter]:  # type: ignore[empty-body]
    """What this plugin's adapters need of their engines, by the names of the drivers.

    Called by `kvx doctor --engine-interface` only.
    """


@hookspec(firstresult=True)
def kvx_choose_transport(local: InstanceInfo, remote: InstanceInfo) -> str | None:
    """The transport for the operations that `local` posts to `remote`.

    Called after each handshake. The answer has to be in both lists of transports, else it is
    ignored. None leaves the choice to the next plugin, and in the end to the order of the
    option `transports`.
    """


@hookspec(firstresult=True)
def kvx_choose_mode(request: RequestInfo) -> Mode | None:
    """Push or pull for one request, in the router.

    None leaves the choice to the next plugin, and in the end to the router's own rule.
    """


@hookspec
def kvx_transfer_finished(outcome: Outcome) -> None:
    """A transfer has ended on this rank, well or not.

    Called once per transfer, off the engine's path and on the runtime's thread: return within a
    millisecond. What it raises is logged and counted, and changes nothing.
    """


@hookspec
def kvx_checks(sections: Mapping[str, Mapping[str, object]]) -> Iterable[Check]:  # type: ignore[empty-body]
    """What this plugin finds in this environment, for `kvx doctor`.

    `sections` are the configured options of each transport, by its name. Called by a command that a
    person waits for: be done within seconds. What may hang or crash belongs into a process of its own.
    """
