"""The entry point: names the transport, and imports it when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.transport import Transport, TransportFactory


def make(section: Mapping[str, Any]) -> Transport:
    """A transport with these options. Raises ConfigError."""
    from kvx_tcp.transport import TcpTransport  # loading a plugin must cost its host nothing

    return TcpTransport(section)


@hookimpl
def kvx_transports() -> Mapping[str, TransportFactory]:
    return {"tcp": make}
