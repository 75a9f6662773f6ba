"""The options of kvx: one list for all engines, from a file, from an engine's settings, from the environment.

Later sources win: the defaults, then the TOML file that `KVX_CONFIG` or the key `config` names, then
the engine's own connector settings, then `KVX_*` variables. An unknown key is refused with the
nearest known one. docs/configuration.md is made from this file by `reference()`.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Attribute, Factory, evolve, field, fields, frozen

from kvx.address import format_address, is_loopback, is_wildcard, parse_address, parse_ip
from kvx.core.errors import ConfigError
from kvx.sockets import try_to_listen

MIN_SECRET_BYTES = 16
_FOREIGN = re.compile(r"KVX_(CONFIG|VENVS|(SERVICE|PORT)(_.*)?)")
"""Variables that are not options: two of kvx's own, and what Kubernetes sets for a service named kvx."""

Check = Callable[[Any, "Attribute[Any]", Any], None]


def _refuse(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"option {name} is {value!r}, but has to be {wanted}")


def _type(kind: type, wanted: str) -> Check:
    def check(_: Any, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise _refuse(attribute.name, value, wanted)

    return check


def _number(low: float, high: float, unit: str = "") -> Check:
    """Seconds have an upper bound too: 30000 is a lease in milliseconds, not one of eight hours."""

    def check(_: Any, attribute: Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refuse(attribute.name, value, "a number" + (" of" + unit if unit else ""))
        if not low <= value <= high:
            hint = " (were milliseconds meant?)" if unit and value > high else ""
            raise _refuse(attribute.name, value, f"between {low:g} and {high:g}{unit}{hint}")

    return check


def _choice(*values: str) -> Check:
    def check(_: Any, attribute: Attribute[Any], value: object) -> None:
        if value not in values:
            raise _refuse(attribute.name, value, "one of " + ", ".join(values))

    return check


def _address(_: Any, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise _refuse(attribute.name, value, "a text HOST:PORT")
    try:
        parse_address(value)
    except ConfigError as error:
        raise ConfigError(f"option {attribute.name}: {error}") from None


def _names(_: Any, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(name, str) and name for name in value) or len(set(value)) != len(value):
        raise _refuse(attribute.name, list(value), "a list of different texts")


def _peers(self: Any, attribute: Attribute[Any], value: tuple[Any, ...]) -> None:
    _names(self, attribute, value)
    for peer in value:
        if "/" in peer and _network(peer) is None:
            raise ConfigError(f"option peers: {peer!r} is not a network (such as 10.1.0.0/16)")


def _sections(_: Any, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(part, Mapping) for part in value.values()):
        raise _refuse(attribute.name, value, "a table of options for each transport")


def _split(value: object) -> tuple[object, ...]:
    """A list, or the same as one text with commas, as an environment variable has to write it."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _key(value: object) -> object:
    return value.encode() if isinstance(value, str) else value


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _option(default: Any, check: Check, text: str, **more: Any) -> Any:
    plain = default.decode() if isinstance(default, bytes) else default
    return field(default=default, validator=check, metadata={"help": text, "default": f"`{json.dumps(plain)}`"}, **more)


def _as(other: str, check: Check, text: str) -> Any:
    default = Factory(lambda self: getattr(self, other), takes_self=True)
    return field(default=default, validator=check, metadata={"help": text, "default": f"as `{other}`"})


_text = _type(str, "a text")
_flag = _type(bool, "true or false")


def _seconds(default: float, high: float, text: str, low: float = 0.01) -> Any:
    return _option(default, _number(low, high, " seconds"), text)


@frozen(kw_only=True)
class Options:
    """What an operator can say. All times are seconds. A value that cannot work raises ConfigError."""

    listen: str = _option("127.0.0.1:5700", _address, "Where the control channel listens; rank i at port + i.")
    advertise: str = _as(
        "listen", _address, "What peers and routers dial, put into Hello, grants and tickets; rank i at port + i."
    )
    instance: str = _as("advertise", _text, "Name of this instance, the same after a restart.")
    secret: bytes = _option(
        b"",
        _type(bytes, "a text"),
        f"Shared secret of all instances and routers, at least {MIN_SECRET_BYTES} bytes. Prefer secret_file.",
        converter=_key,
        repr=False,
    )
    secret_file: str = _option("", _text, "File that holds the secret; white space around it is dropped.")
    insecure: bool = _option(False, _flag, "Listen beyond loopback without a secret. For closed test networks only.")
    peers: tuple[str, ...] = _option(
        (),
        _peers,
        "Hosts that a request may send this instance to: host names, IP addresses, networks, or `any`. "
        "Empty: loopback, the host of advertise, and the /24 (IPv6: /64) around it.",
        converter=_split,
    )
    tls_cert: str = _option("", _text, "Not available in this version: setting it is refused.")
    tls_key: str = _option("", _text, "Not available in this version: setting it is refused.")
    tls_ca: str = _option("", _text, "Not available in this version: setting it is refused.")

    mode: str = _option(
        "auto",
        _choice("auto", "push", "pull"),
        "`auto` does what a request asks for; `push` or `pull` refuses the other.",
    )
    transports: tuple[str, ...] = _option(
        ("tcp",),
        _names,
        "Transports by preference: names of plugins, or `package.module:factory`. One that does not load here is "
        "left out, one that does not reach a peer is replaced by the next; the log says so.",
        converter=_split,
    )
    sections: Mapping[str, Mapping[str, Any]] = field(
        factory=dict, validator=_sections, metadata={"help": "Options of each transport, by its name."}
    )
    integrity: str = _option(
        "none", _choice("none", "crc"), "`crc`: both ends compare a digest of the moved bytes (host memory)."
    )
    max_held_fraction: float = _option(
        0.5,
        _number(0.01, 1.0),
        "Share of the block pool that transfers may hold at once; above it new ones are refused.",
    )

    lease_s: float = _seconds(30, 600, "How long granted blocks are kept without a renewal.")
    patience_s: float = _seconds(120, 3600, "How long a transfer waits for the other side's blocks or grant.")
    part_gap_s: float = _seconds(60, 3600, "Longest pause between two parts of one prefill.")
    op_timeout_s: float = _seconds(30, 3600, "Longest time of one posted operation.")
    drain_limit_s: float = _seconds(8, 600, "How long an initiator that stops waits for its operations to end.")
    grace_s: float = _seconds(10, 900, "How long a target waits for the answer to Revoke before it fences.")
    quarantine_s: float = _seconds(
        5, 3600, "How long blocks stay unused after the process that wrote them is proven gone.", low=0
    )
    transfer_max_s: float = _seconds(600, 86400, "Longest time of a transfer, from the engine's first call on.")
    keepalive_s: float = _seconds(2, 60, "Pause between two signs of life while transfers are open.")
    lost_s: float = _seconds(6, 300, "Silence after which a peer counts as lost.")
    ack_wait_s: float = _seconds(10, 600, "How long Done waits for its Ack.")
    handshake_s: float = _seconds(10, 120, "Longest time to open and authenticate a control connection.")

    event_log: str = _option(
        "", _text, "File to which each rank appends one JSON line per finished transfer. Empty: none."
    )
    allow_untested_engine: bool = _option(False, _flag, "Run in an engine version that kvx was not tested with.")

    def __attrs_post_init__(self) -> None:
        _check_together(self)

    @classmethod
    def load(cls, settings: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Options:
        """Options from an engine's `settings` (keys as here) and `env` (by default the process's).

        Raises ConfigError: an unknown key, a wrong value, a file that cannot be read, options that
        cannot work together.
        """
        variables = dict(os.environ if env is None else env)
        given = dict(settings or {})
        named = given.pop("config", "")
        path = variables.get("KVX_CONFIG") or named
        values: dict[str, Any] = _known(_read_toml(path), f"file {path}") if path else {}
        for source in (_known(given, "the engine's kvx settings"), _from_env(variables)):
            sections = {**values.get("sections", {})}
            for name, part in source.get("sections", {}).items():
                sections[name] = {**sections.get(name, {}), **part}
            values = {**values, **source, "sections": sections}
        if values.get("secret_file"):
            if values.get("secret"):
                raise ConfigError("options secret and secret_file are both set: keep one of them")
            values["secret"] = _read_secret(values["secret_file"])
        return cls(**values)

    def at_rank(self, rank: int) -> Options:
        """The options of one rank of this instance: the same, with the addresses `rank` ports further."""

        def shift(name: str, address: str) -> str:
            host, port = parse_address(address)
            if port + rank > 65535 or (port == 0 and rank > 0):
                raise ConfigError(f"option {name} is {address!r}: there is no port for rank {rank}")
            return format_address(host, port + rank)

        return evolve(self, listen=shift("listen", self.listen), advertise=shift("advertise", self.advertise))

    def transport_section(self, name: str, rank: int) -> dict[str, Any]:
        """What the factory of transport `name` is called with on one rank (see `TransportFactory`)."""
        return {
            "listen_host": parse_address(self.listen)[0],
            "advertise_host": parse_address(self.advertise)[0],
            **self.sections.get(name, {}),
            "secret": self.secret,
            "insecure": self.insecure,
            "peer": f"{self.instance}#{rank}",
        }

    def check_listen(self, remedy: str) -> None:
        """Raises ConfigError, with what to do, where `listen` cannot be listened on now."""
        try:
            try_to_listen(self.listen)
        except OSError as error:
            raise ConfigError(f"option listen: cannot listen on {self.listen} ({error.strerror}): {remedy}") from error

    def may_dial(self, address: str) -> bool:
        """Whether a request may name `address` as its peer (option `peers`; without a secret loopback only)."""
        try:
            host, _ = parse_address(address)
        except ConfigError:
            return False
        if is_loopback(host):
            return not self.peers or any(peer == "any" or _covers(peer, host) for peer in self.peers)
        if not self.secret and not self.insecure:
            return False
        own = parse_address(self.advertise)[0]
        ip = parse_ip(own)
        around = () if ip is None else (f"{ip}/{24 if ip.version == 4 else 64}",)
        return any(peer == "any" or _covers(peer, host) for peer in self.peers or (own, *around))


def _covers(peer: str, host: str) -> bool:
    ip = parse_ip(host)
    network = _network(peer)
    if ip is None or network is None:
        return peer.lower().rstrip(".") == host.lower().rstrip(".")
    return ip in network


_OPTIONS = {attribute.name: attribute for attribute in fields(Options)}


def _check_together(options: Options) -> None:
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if getattr(options, name):
            raise ConfigError(f"option {name} is set, but this version of kvx has no TLS yet: remove it, use a secret")
    if options.secret and len(options.secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"option secret has {len(options.secret)} bytes, it needs at least {MIN_SECRET_BYTES}")
    listen, advertise = parse_address(options.listen)[0], parse_address(options.advertise)[0]
    if is_wildcard(advertise):
        raise ConfigError(
            f"option advertise is {options.advertise!r}, which nobody can dial: set advertise to this machine's address"
        )
    if is_loopback(advertise) and not is_loopback(listen):
        raise ConfigError(
            f"option advertise is {options.advertise!r} while listen is {options.listen!r}: peers on other machines "
            "would dial themselves; set advertise to this machine's address"
        )
    if not is_loopback(listen) and not options.secret and not options.insecure:
        raise ConfigError(
            f"option listen is {options.listen!r}, which is beyond loopback, and there is no secret: "
            "set secret_file, or insecure = true in a closed test network"
        )
    if options.instance == options.advertise and parse_address(options.advertise)[1] == 0:
        raise ConfigError("option listen has port 0, which names no instance: set instance too, or a port")
    if not 1 <= len(options.instance) <= 256:
        raise _refuse("instance", options.instance, "1 to 256 characters")
    if not options.transports:
        raise ConfigError("option transports is empty: name at least one, such as tcp")
    for name in options.sections:
        if name not in options.transports:
            raise ConfigError(
                f"there are options for {name!r}, which is not in transports ({', '.join(options.transports)})"
            )
    if options.lease_s / 3 + options.lost_s >= options.lease_s:
        raise ConfigError(
            f"lease_s / 3 + lost_s has to be less than lease_s, or one lost connection ends a lease: "
            f"with lost_s = {options.lost_s:g} set lease_s above {options.lost_s * 1.5:g}"
        )
    if options.grace_s <= options.drain_limit_s:
        raise ConfigError(
            f"grace_s ({options.grace_s:g}) has to be more than drain_limit_s ({options.drain_limit_s:g}) "
            "by a round trip, or peers that answer in time are fenced"
        )
    if options.keepalive_s * 2 > options.lost_s:
        raise ConfigError(
            f"keepalive_s ({options.keepalive_s:g}) has to be at most half of lost_s ({options.lost_s:g}), "
            "or quiet peers count as lost"
        )


def _known(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options in `given`; a table under another name is the section of a transport."""
    values: dict[str, Any] = {}
    sections: dict[str, Mapping[str, Any]] = {}
    for name, value in given.items():
        if name in _OPTIONS and name != "sections":
            values[name] = value
        elif isinstance(value, Mapping) and name != "sections":
            sections[name] = value
        else:
            raise ConfigError(f"{source}: there is no option {name!r}{_nearest(name)}")
    return {**values, "sections": sections} if sections else values


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [option for option in _OPTIONS if option != "sections"], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; docs/configuration.md lists them"


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """`KVX_LEASE_S=20`, and `KVX_TCP__STREAMS=4` for key `streams` in the section of `tcp`.

    A plugin's name has no underscore, so one stands for its hyphen; a `package.module:factory` keeps its own.
    """
    given: dict[str, Any] = {}
    for variable, text in sorted(env.items()):
        if not variable.startswith("KVX_") or _FOREIGN.fullmatch(variable):
            continue
        name, separator, key = variable.removeprefix("KVX_").lower().partition("__")
        if separator:
            given.setdefault(name if ":" in name else name.replace("_", "-"), {})[key] = _toml_value(text)
        elif name in _OPTIONS and name != "sections":
            given[name] = _typed(name, text)
        else:
            raise ConfigError(f"environment variable {variable}: there is no option {name!r}{_nearest(name)}")
    return _known(given, "environment")


def _typed(name: str, text: str) -> Any:
    """Only numbers and flags are parsed: a secret of digits stays a text."""
    default = _OPTIONS[name].default
    if isinstance(default, bool | float | int):
        return _toml_value(text)
    return text


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: object) -> dict[str, Any]:
    if not isinstance(path, str):
        raise _refuse("config", path, "the path of a TOML file")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def _read_secret(path: object) -> bytes:
    if not isinstance(path, str):
        raise _refuse("secret_file", path, "a path")
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file {path} cannot be read: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret_file {path} holds {len(secret)} bytes, it needs at least {MIN_SECRET_BYTES}")
    return secret


BOUNDS: Mapping[str, tuple[str, ...]] = {
    "nobody answers at the peer's address": ("handshake_s",),
    "the peer's blocks or grant never come": ("patience_s",),
    "a push whose request never reaches the producer": ("lease_s", "grace_s"),
    "the reader of a ticket dies or never comes": ("lease_s",),
    "the producer stops between two parts": ("part_gap_s", "grace_s"),
    "an operation hangs": ("op_timeout_s", "lease_s", "grace_s"),
    "the peer dies or stops in mid-transfer": ("lost_s", "grace_s"),
    "the link is cut, or carries what is no message, and stays so": ("lost_s", "grace_s"),
    "a message is refused: other facts, other blocks, out of bounds": ("grace_s",),
    "an abort": ("grace_s",),
    "an abort of an initiator whose operations do not end": ("lease_s", "grace_s"),
    "the answer to Done is lost": ("ack_wait_s",),
    "a transfer is alive and too slow": ("transfer_max_s", "grace_s"),
}
"""For each class of failure the options whose sum bounds it.

Counted from the failure (waits for the peer or its blocks: from the engine's first call). A side that
has to stop first drains or revokes, which `grace_s` bounds: it is more than `drain_limit_s`. In the
two classes of operations that do not end, the target hears nothing and its lease decides.
"""


def bounds(options: Options) -> dict[str, float]:
    """For each class of failure the longest time, in seconds, until both engines have their outcome."""
    return {failure: sum(getattr(options, name) for name in names) for failure, names in BOUNDS.items()}


def reference() -> str:
    """The table of all options, as Markdown."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, attribute in _OPTIONS.items():
        if name == "sections":
            continue
        rows.append(f"| `{name}` | {attribute.metadata['default']} | {attribute.metadata['help']} |")
    return "\n".join(rows) + "\n"
