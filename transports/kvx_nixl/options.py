"""The options of a NIXL transport's section of the configuration."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen
from attrs.validators import ge, le

from kvx.core.errors import ConfigError


@frozen(kw_only=True)
class Options:
    """Sizes in bytes, times in seconds.

    `listen_host`, `advertise_host`, `port` and `advertise_port` are those of the bell. NIXL's own
    addresses are chosen by its backend: `devices` narrows them (UCX: "mlx5_0:1,eth0"), `tls` is
    UCX's list of transports ("tcp"), `provider` libfabric's ("efa", "tcp"), `params` goes to the
    backend as it is. `preload` lists shared libraries that are loaded first, for hosts whose loader
    does not find libfabric.

    An operation is cut into posts of at most `post_bytes` and `post_pieces`; about `window_bytes`
    and `window_pieces` are in flight to one peer. The numbers of pieces are 0 for the backend's own.
    A call into NIXL may take `call_s`, starting an agent `open_s`, an introduction `handshake_s`.

    `peer` is this rank's name, `secret` proves it; `insecure` allows addresses beyond loopback
    without a secret. `trusted_network` allows them to NIXL alone, whose own connections no secret
    protects.
    """

    listen_host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    advertise_port: int = field(default=0, validator=[ge(0), le(65535)])
    secret: bytes = field(default=b"", repr=False)
    peer: str = ""
    insecure: bool = False
    trusted_network: bool = False
    devices: str = ""
    tls: str = ""
    provider: str = ""
    params: Mapping[str, str] = field(factory=dict)
    preload: tuple[str, ...] = field(default=(), converter=tuple)
    post_bytes: int = field(default=4 << 20, validator=[ge(4096), le(1 << 30)])
    post_pieces: int = field(default=0, validator=[ge(0), le(65536)])
    window_bytes: int = field(default=16 << 20, validator=[ge(4096), le(1 << 32)])
    window_pieces: int = field(default=0, validator=[ge(0), le(65536)])
    call_s: float = field(default=5.0, validator=[ge(0.1), le(600)])
    open_s: float = field(default=30.0, validator=[ge(0.1), le(600)])
    handshake_s: float = field(default=10.0, validator=[ge(0.1), le(600)])

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Options:
        """Raises ConfigError for an unknown key or a value that cannot be used."""
        known = {attribute.name: attribute for attribute in fields(cls)}
        for key, value in section.items():
            if key not in known:
                raise ConfigError(f"kvx_nixl has no option {key!r}; it has {', '.join(known)}")
            if not _fits(key, known[key].default, value):
                raise ConfigError(f"option {key!r} of kvx_nixl cannot be {value!r}")
        try:
            return cls(**section)
        except ValueError as error:
            raise ConfigError(f"kvx_nixl: {error.args[0]}") from error

    def may_use(self, host: str) -> bool:
        """May the bell listen on this numeric address, or dial it?"""
        return self.open_to_the_network or ipaddress.ip_address(host).is_loopback

    @property
    def open_to_the_network(self) -> bool:
        return bool(self.secret) or self.insecure


def _fits(key: str, default: object, value: object) -> bool:
    if key == "params":
        return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
    if key == "preload":
        return isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float) if isinstance(default, float) else isinstance(value, type(default))


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Numeric address of one of this host's own names. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, str(address[0])
