"""The options of kvx_tcp's section of the configuration."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen
from attrs.validators import ge, le

from kvx.core.errors import ConfigError
from kvx_tcp.frames import MAX_CHUNK
from kvx_tcp.link import ALONE


@frozen(kw_only=True)
class Options:
    """Sizes in bytes, times in seconds.

    `listen_host` is where to listen; `advertise_host`, by default the same, is what peers dial: a
    name is resolved here, once, and travels as a number. `port` 0 takes any free one; peers dial
    `advertise_port` in its place where a port mapping stands before it. `peer` is this rank's name,
    `secret` proves it. `streams` is the number of connections per peer, the smaller of both sides'
    counts. `chunk_bytes` is what an operation moves before another one that waits has its turn.
    `buffer_bytes` 0 leaves the socket buffers to the kernel. A handshake may take `handshake_s`; a
    host that has not answered for `silence_s` is given up. `insecure` allows addresses beyond
    loopback without a secret.
    """

    listen_host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    advertise_port: int = field(default=0, validator=[ge(0), le(65535)])
    secret: bytes = field(default=b"", repr=False)
    peer: str = ""
    streams: int = field(default=2, validator=[ge(1), le(64)])
    chunk_bytes: int = field(default=1 << 20, validator=[ge(4096), le(MAX_CHUNK // ALONE)])
    buffer_bytes: int = field(default=0, validator=[ge(0), le(1 << 30)])
    handshake_s: float = field(default=10.0, validator=[ge(0.01), le(3600)])
    silence_s: float = field(default=20.0, validator=[ge(1), le(3600)])
    insecure: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Options:
        """Raises ConfigError for an unknown key or a value that cannot be used."""
        known = {attribute.name: attribute for attribute in fields(cls)}
        for key, value in section.items():
            if key not in known:
                raise ConfigError(f"kvx_tcp has no option {key!r}; it has {', '.join(known)}")
            kind = type(known[key].default)
            if not isinstance(value, (int, float) if kind is float else kind) or (
                kind is not bool and isinstance(value, bool)
            ):
                raise ConfigError(f"option {key!r} of kvx_tcp is {value!r}; a {kind.__name__} is needed")
        try:
            return cls(**section)
        except ValueError as error:
            raise ConfigError(f"kvx_tcp: {error.args[0]}") from error

    def may_use(self, host: str) -> bool:
        """May this numeric address be listened on, or dialled?"""
        return bool(self.secret) or self.insecure or ipaddress.ip_address(host).is_loopback


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Numeric address of one of this host's own names. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, str(address[0])
