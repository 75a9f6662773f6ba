"""Control addresses: `HOST:PORT`, an IPv6 host in square brackets. Pure: nothing is resolved."""

from __future__ import annotations

import ipaddress
import re

from kvx.core.errors import ConfigError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_LENGTH = 300
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


def parse_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port (0 to 65535) of `text`. Raises ConfigError that says what is wrong."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{text[:MAX_LENGTH]!r}... is longer than any address")
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise ConfigError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host or parse_ip(host) is None:
            raise ConfigError(f"{text!r}: only an IPv6 address stands in square brackets")
    elif ":" in host:
        raise ConfigError(f"{text!r}: an IPv6 address needs square brackets, as in [::1]:5700")
    elif re.fullmatch(r"[0-9.]+", host) and parse_ip(host) is None:
        raise ConfigError(f"{text!r}: {host!r} is not an IPv4 address")
    elif _HOST_NAME.fullmatch(host) is None:
        raise ConfigError(f"{text!r}: {host!r} is not a host name")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{text!r}: {port!r} is not a port (0 to 65535)")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_ip(host: str) -> IPAddress | None:
    """The address that `host` writes out, an IPv4 one also where it is mapped into IPv6; None: a name."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can be meant. A name other than localhost is not looked up."""
    ip = parse_ip(host)
    return host.lower() == "localhost" if ip is None else ip.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` means "every interface", which can be listened on and never dialled."""
    ip = parse_ip(host)
    return ip is not None and ip.is_unspecified
