"""The entry point: names the transports, and imports them when one is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.checks import Check
    from kvx.transport import Transport, TransportFactory


def make_ucx(section: Mapping[str, Any]) -> Transport:
    """UCX: InfiniBand, RoCE, shared memory, TCP. Raises ConfigError, ImportError."""
    from kvx_nixl.backends import UCX  # loading a plugin must cost its host nothing
    from kvx_nixl.transport import NixlTransport

    return NixlTransport(UCX, section)


def make_libfabric(section: Mapping[str, Any]) -> Transport:
    """LIBFABRIC: EFA, and for tests TCP. Raises ConfigError, ImportError."""
    from kvx_nixl.backends import LIBFABRIC
    from kvx_nixl.transport import NixlTransport

    return NixlTransport(LIBFABRIC, section)


@hookimpl
def kvx_transports() -> Mapping[str, TransportFactory]:
    return {"nixl-ucx": make_ucx, "nixl-libfabric": make_libfabric}


@hookimpl
def kvx_checks(sections: Mapping[str, Mapping[str, Any]]) -> Iterable[Check]:
    from kvx_nixl.checks import examine

    return list(examine(sections))
