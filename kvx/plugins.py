"""Named, guarded loading of the entry-point group `kvx`.

A plugin that cannot be imported, or whose hook raises, is kept in `broken` with the reason and
breaks only itself: the error is raised when that very name is asked for. kvx's own plugins come
through the same door.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import pluggy
from attrs import define, field

from kvx import hookspecs
from kvx.core.errors import ConfigError, PluginError, TransportError

if TYPE_CHECKING:  # loading plugins shall cost their host next to nothing
    from kvx.checks import Check
    from kvx.core.model import InstanceInfo, Mode, Outcome
    from kvx.drift import Adapter
    from kvx.driver import EngineDriver, RequestInfo
    from kvx.transport import Transport, TransportFactory

GROUP = "kvx"
_log = logging.getLogger(__name__)


@define(eq=False)
class Plugins:
    """The plugins of this process, by name. Made by `load`."""

    broken: dict[str, PluginError] = field(factory=dict)
    observer_errors: int = 0
    _plugins: dict[str, pluggy.PluginManager] = field(factory=dict)

    @property
    def names(self) -> list[str]:
        """The plugins that work, sorted."""
        return sorted(self._plugins)

    def add(self, name: str, plugin: object) -> None:
        """Take a plugin's module (or any object with hooks). Raises PluginError where a hook is not kvx's."""
        if name in self._plugins:
            raise PluginError(f"two plugins are called {name!r}: uninstall one of them")
        # One manager for each plugin, so that each can be called, and fail, alone.
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(plugin, name=name)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name!r} has a hook that is not kvx's: {error}") from error
        self._plugins[name] = manager

    def transports(self) -> dict[str, TransportFactory]:
        """The factories of all transports, by name."""
        found: dict[str, TransportFactory] = {}
        for plugin, factories in self._ask("kvx_transports"):
            found.update(self._named(plugin, factories))
        return found

    def make_transport(self, name: str, options: Mapping[str, Any]) -> Transport:
        """One transport, by name or as `package.module:factory`.

        Raises PluginError where there is none, and what its factory raises: ConfigError or
        TransportError, or PluginError where something has to be installed.
        """
        factory = (
            cast("TransportFactory", _import_factory("transport", name)) if ":" in name else self.transports().get(name)
        )
        if factory is None:
            raise self._missing("transport", name, self.transports())
        try:
            return factory(options)
        except (ConfigError, PluginError, TransportError):
            raise
        except ImportError as error:
            raise PluginError(
                f"transport {name!r} needs something that is not installed: {error}. {_hint(name)}"
            ) from error

    def drivers(self) -> dict[str, EngineDriver]:
        """The drivers of all engines, by name."""
        found: dict[str, EngineDriver] = {}
        for plugin, drivers in self._ask("kvx_drivers"):
            found.update(self._named(plugin, drivers))
        return found

    def driver(self, name: str) -> EngineDriver:
        """One engine's driver, by name or as `package.module:factory`. Raises PluginError."""
        if ":" in name:
            return cast("EngineDriver", _import_factory("engine", name)())
        drivers = self.drivers()
        if name not in drivers:
            raise self._missing("engine", name, drivers)
        return drivers[name]

    def interfaces(self) -> dict[str, Adapter]:
        """What each adapter needs of its engine, by name."""
        found: dict[str, Adapter] = {}
        for plugin, adapters in self._ask("kvx_interfaces"):
            found.update(self._named(plugin, adapters))
        return found

    def checks(self, sections: Mapping[str, Mapping[str, Any]]) -> list[Check]:
        """What each plugin has to tell about this environment."""
        return [check for _, found in self._ask("kvx_checks", sections=sections) for check in found]

    def choose_transport(self, local: InstanceInfo, remote: InstanceInfo) -> str | None:
        """The first plugin's choice that both sides have; else the first of `local` that both have; else None."""
        common = [name for name in local.transports if name in remote.transports]
        for _, choice in self._ask("kvx_choose_transport", local=local, remote=remote):
            if choice in common:
                return str(choice)
        return common[0] if common else None

    def choose_mode(self, request: RequestInfo) -> Mode | None:
        """The first plugin's choice, or None."""
        return next((choice for _, choice in self._ask("kvx_choose_mode", request=request)), None)

    def transfer_finished(self, outcome: Outcome) -> None:
        """Tell every observer; what they raise is logged and counted in `observer_errors`."""
        for name, manager in self._plugins.items():
            try:
                manager.hook.kvx_transfer_finished(outcome=outcome)
            except Exception:  # noqa: BLE001 - foreign code must not fail its host
                self.observer_errors += 1
                _log.exception("plugin %r failed in kvx_transfer_finished", name)

    def _ask(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Each plugin's answer; a plugin that raises is broken from then on."""
        for name in self.names:
            try:
                answer = getattr(self._plugins[name].hook, hook)(**arguments)
            except Exception as error:  # noqa: BLE001 - foreign code must not fail its host
                self.set_aside(name, f"{hook} raised {type(error).__name__}: {error}", error)
                continue
            for one in answer if isinstance(answer, list) else [answer]:
                if one is not None:
                    yield name, one

    def _named(self, plugin: str, things: Any) -> dict[str, Any]:
        """What a plugin offers, where the names are its own; others could hide another plugin's."""
        if not isinstance(things, Mapping):
            self.set_aside(plugin, f"it gave {type(things).__name__} where names and values belong")
            return {}
        foreign = [name for name in things if name != plugin and not str(name).startswith(f"{plugin}-")]
        if foreign:
            self.set_aside(plugin, f"it offers {foreign[0]!r}, but its names are {plugin!r} and {plugin + '-...'!r}")
            return {}
        return dict(things)

    def set_aside(self, name: str, text: str, cause: BaseException | None = None) -> None:
        """Count a plugin as broken and ask it nothing any more."""
        error = PluginError(f"plugin {name!r} is broken: {text}")
        error.__cause__ = cause
        self.broken[name] = error
        self._plugins.pop(name, None)
        _log.warning("%s", error)

    def _missing(self, kind: str, name: str, known: Iterable[str]) -> PluginError:
        for plugin, error in self.broken.items():
            if name == plugin or name.startswith(f"{plugin}-"):
                return error
        return PluginError(
            f"there is no {kind} {name!r} here, only: {', '.join(sorted(known)) or 'none'}. {_hint(name)}"
        )


def load() -> Plugins:
    """Load every plugin that is installed; never raises for one of them."""
    plugins = Plugins()
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            plugins.add(entry.name, entry.load())
        except PluginError as error:
            plugins.broken[entry.name] = error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code must not fail its host
            plugins.set_aside(
                entry.name, f"{entry.value} raised {type(error).__name__}: {error}. {_hint(entry.name)}", error
            )
    return plugins


def make_transport(name: str, options: Mapping[str, Any]) -> Transport:
    """`load().make_transport(...)`, for programs that need one transport and no other plugin."""
    return load().make_transport(name, options)


def _import_factory(kind: str, name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"{kind} {name!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise PluginError(f"{kind} {name!r} is not a factory: it cannot be called")
    return cast("Callable[..., Any]", factory)


def _hint(name: str) -> str:
    """What to install, where kvx itself has an extra for it."""
    extra = name.partition("-")[0]
    try:
        extras = importlib.metadata.metadata("kvx").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        extras = []
    if extra in extras:
        return f"Install it with: pip install 'kvx[{extra}]'"
    return "Install the distribution that provides it; `kvx doctor` shows what is here"
