"""The thing tested, and what it says of itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, cast, runtime_checkable

from attrs import field, frozen

from kvx import plugins
from kvx.core.errors import PluginError
from kvx.core.model import Access, Capabilities, FenceScope, Mode, Op
from kvx.driver import EngineDriver
from kvx.engine import EngineInstance
from kvx.transport import Transport

OPEN_INSTANCE = "kvx.instance:open_instance"


class Feature(Enum):
    """What a transport or an engine may have or lack. A case is not run where what it needs is not declared."""

    WRITE = "write"
    READ = "read"
    FORBID = "forbid"  # access = grant: the target itself keeps operations out
    FENCE = "fence"  # of one peer
    CANCEL = "cancel"
    RELAY = "relay"  # its data connections can be led through a proxy
    BLOCKS = "blocks"  # an engine's driver counts its servers' free blocks
    RAW = "raw"  # an engine's driver reads its servers' cache past the adapter
    CUT = "cut"  # an engine's driver can start a server whose cache is cut in another way
    PUSH = "push"  # an engine's servers can
    PULL = "pull"
    ALONE = "alone"  # an engine's servers have no roles: each serves requests alone too


def features(declared: Capabilities, subject: Subject) -> frozenset[Feature]:
    """What this subject has: by its transport's `capabilities`, by how that is made, and by its engine's driver."""
    driver = subject.driver() if subject.engine else None
    present = {
        Feature.WRITE: Op.WRITE in declared.ops,
        Feature.READ: Op.READ in declared.ops,
        Feature.FORBID: declared.access is Access.GRANT,
        Feature.FENCE: declared.fence is FenceScope.PEER,
        Feature.CANCEL: declared.cancel,
        Feature.RELAY: subject.relayed,
        Feature.BLOCKS: isinstance(driver, CountsBlocks),
        Feature.RAW: isinstance(driver, ReadsCache),
        Feature.CUT: isinstance(driver, CutsOtherwise),
        Feature.PUSH: driver is not None and Mode.PUSH in driver.modes,
        Feature.PULL: driver is not None and Mode.PULL in driver.modes,
        Feature.ALONE: driver is not None and not driver.has_roles,
    }
    return frozenset(feature for feature, declares in present.items() if declares)


@runtime_checkable
class CountsBlocks(Protocol):
    """What a driver may have beside `kvx.driver.EngineDriver`: then cases look for blocks that never come back."""

    def free_blocks(self, url: str) -> int:
        """How many blocks new requests of this server can have now. Raises OSError, LookupError or ValueError."""
        ...


@runtime_checkable
class ReadsCache(Protocol):
    """What a driver may have: then cases compare the bytes of the cache, not only tokens."""

    def raw_kv(self, url: str, tokens: Sequence[int]) -> bytes:
        """The keys and values of the longest beginning of `tokens` that this server has in whole blocks, in the order
        of tokens, as they stand in its memory. Two servers of one model and equal bytes: equal caches. Raises
        OSError, LookupError or ValueError."""
        ...


@runtime_checkable
class CutsOtherwise(Protocol):
    """What a driver may have: then cases let servers speak whose caches are cut in unlike ways."""

    def other_cut(self) -> tuple[str, ...]:
        """Arguments, behind those of the small model, of a server with another block size or number of ranks, with
        which a server without them can exchange its cache."""
        ...


@frozen
class Subject:
    """What is tested: a transport, by name or as `package.module:factory`, and the instance that runs on it."""

    transport: str
    options: Mapping[str, Any] = field(factory=dict)
    """Further keys of the transport's section."""
    instance: str = OPEN_INSTANCE
    """`package.module:function` with the signature of `kvx.instance.open_instance`."""
    engine: str = ""
    """An engine's driver, by name or as `package.module:factory`, for the cases that test its servers."""

    @property
    def relayed(self) -> bool:
        """Its data connections can be led through a proxy: it listens on `port`, and peers dial `advertise_port`.

        So do kvx's own transport and the suite's wrappers of it; others say so by having `advertise_port` in `options`.
        """
        own = self.transport == "tcp" or self.transport.startswith("kvx_conformance.")
        return (own and self.options.get("inner", "tcp") == "tcp") or "advertise_port" in self.options

    def make_transport(self, peer: str, **options: Any) -> Transport:
        """One rank's transport. Raises PluginError, ConfigError or TransportError."""
        return plugins.make_transport(self.transport, {**self.options, **options, "peer": peer})

    def driver(self) -> EngineDriver:
        """Raises PluginError where it or its engine is not installed."""
        found = plugins.load().driver(self.engine)
        if found.installed() is None:
            raise PluginError(f"engine {self.engine!r} is not installed in this environment")
        return found

    def opener(self) -> Callable[..., EngineInstance]:
        """Raises PluginError where there is none."""
        module, _, name = self.instance.partition(":")
        try:
            return cast("Callable[..., EngineInstance]", getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise PluginError(f"no instance {self.instance!r}: {error}") from error
