"""How a router is set up, checked before it starts."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from attrs import frozen

from kvx.address import is_loopback, parse_address
from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx.core.model import Mode
from kvx.driver import Dialect
from kvx.router.policy import Wish
from kvx.router.pool import Instance
from kvx.router.upstream import Limits

MIN_KEY = 16
"""Characters of an API key."""
MAX_POOL_FILE = 1 << 20
"""Bytes of a pool file."""

Stamp = tuple[int, int, int]
"""Changes whenever a file is written or replaced."""


@frozen(kw_only=True)
class Flow:
    """How much the router takes on.

    `room` open requests at one instance, `queue` that wait in the router, each at most `queue_s` seconds. While a
    prefilled prompt waits longer than `stall_s` for a decode instance, no further prompt is prefilled.
    """

    room: int = 256
    queue: int = 1024
    queue_s: float = 60.0
    stall_s: float = 2.0


@frozen
class PoolFile:
    """A TOML file with the keys `prefill` and `decode`, each a list of what the options of that name take."""

    path: Path

    def stamp(self) -> Stamp | None:
        """None: it cannot be looked at."""
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def read(self, mode: Mode | None) -> tuple[list[Instance], list[Instance]]:
        """Both pools. Raises ConfigError, whose text names the file."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_POOL_FILE + 1)
            if len(data) > MAX_POOL_FILE:
                raise ConfigError(f"it has more than {MAX_POOL_FILE} bytes")
            content = tomllib.loads(data.decode())
            if unknown := sorted(content.keys() - {"prefill", "decode"}):
                raise ConfigError(f"unknown key {unknown[0]!r}; known are prefill and decode")
            texts = [content.get(name, []) for name in ("prefill", "decode")]
            if not all(isinstance(pool, list) and all(isinstance(one, str) for one in pool) for pool in texts):
                raise ConfigError("prefill and decode have to be lists of texts")
            return instances(texts[0], texts[1], mode)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(f"pool file {self.path}: {error}") from error


@frozen(kw_only=True)
class Settings:
    """`mode` None: it may differ between requests, within `modes`, which are what the engines can do.

    `api_key` is asked of clients and shown to instances. Told to stop, the router gives open requests `drain_s`
    seconds. `pool_file` is looked at again and again; without one the pools stay as they are.
    """

    prefill: Sequence[Instance]
    decode: Sequence[Instance]
    mode: Mode | None
    dialect: Dialect
    wish: Wish
    options: Options
    limits: Limits
    host: str
    port: int
    api_key: str = ""
    modes: frozenset[Mode] = frozenset(Mode)
    flow: Flow = Flow()
    drain_s: float = 20.0
    pool_file: PoolFile | None = None


def instances(
    prefill: Sequence[str], decode: Sequence[str], mode: Mode | None
) -> tuple[list[Instance], list[Instance]]:
    """Both pools from `URL[=HOST:PORT]` and `URL`. Raises ConfigError.

    A prefill instance without a control address is asked for it, unless all requests are pulled.
    """
    pools = [Instance(*_split(text)) for text in prefill], [Instance(_url(text)) for text in decode]
    for name, pool in zip(("prefill", "decode"), pools, strict=True):
        if not pool:
            raise ConfigError(f"the router needs at least one {name} URL")
        if len({instance.url for instance in pool}) < len(pool):
            raise ConfigError(f"two {name} instances have the same URL")
    if both := {instance.url for instance in pools[0]} & {instance.url for instance in pools[1]}:
        raise ConfigError(f"{min(both)} stands in both pools: the router would let an instance move blocks to itself")
    for instance in pools[0]:
        instance.probing = instance.address is None and mode is not Mode.PULL
    return pools


def able(mode: Mode | None, modes: frozenset[Mode]) -> frozenset[Mode]:
    """The `modes` of the engines. Raises ConfigError where `mode` is not among them."""
    if mode is not None and mode not in modes:
        raise ConfigError(
            f"--mode {mode.value}: these engines can only {', '.join(sorted(one.value for one in modes))}"
        )
    return modes


def check_exposure(host: str, api_key_file: str | None, *, insecure: bool) -> str:
    """The API key. Raises ConfigError where the router would be open to others than this machine."""
    key = _read_key(api_key_file) if api_key_file else ""
    if not is_loopback(host) and not key and not insecure:
        raise ConfigError(
            f"--host {host} is beyond loopback: anyone who reaches it could use the engines; "
            "give --api-key-file FILE, or --insecure in a closed network"
        )
    return key


def _read_key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from error
    if len(key) < MIN_KEY or not key.isprintable() or " " in key:
        raise ConfigError(f"--api-key-file {path} has to hold one word of at least {MIN_KEY} characters")
    return key


def _split(text: str) -> tuple[str, str | None]:
    url, separator, address = text.partition("=")
    if separator:
        parse_address(address)
    return _url(url), address if separator else None


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not parts.query and not parts.fragment and parts.username is None
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{text!r} is not a URL such as http://127.0.0.1:8100")
    return text.rstrip("/")
