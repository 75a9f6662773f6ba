"""How a router is set up, checked before it starts."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from attrs import frozen

from kvx.address import is_loopback, parse_address
from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx.core.model import Mode
from kvx.driver import Dialect
from kvx.router import names
from kvx.router.policy import Wish
from kvx.router.pool import Instance
from kvx.router.upstream import Limits

MIN_KEY = 16
"""Characters of an API key."""
MAX_POOL_FILE = 1 << 20
"""Bytes of a pool file."""

Place = tuple[str, str | None]
"""The URL of an instance, and its control address where the operator has said it."""
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
class Listing:
    """Both pools as an operator writes them: `URL`, for prefill `URL=HOST:PORT`, and `http+dns://NAME:PORT` for all
    addresses of a name. Raises ConfigError.
    """

    prefill: Sequence[str]
    decode: Sequence[str]

    def __attrs_post_init__(self) -> None:
        self.instances(None)

    @property
    def names(self) -> dict[str, str]:
        """The pool of each name that has to be looked up."""
        pools = {"prefill": self.prefill, "decode": self.decode}
        return {text.rstrip("/"): pool for pool, texts in pools.items() for text in texts if names.is_name(text)}

    def instances(
        self, mode: Mode | None, addresses: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[list[Instance], list[Instance]]:
        """Both pools, where the names of `names` have these addresses; without one a name adds nothing.

        A prefill instance without a control address is asked for it, unless all requests are pulled. Raises
        ConfigError.
        """
        written: tuple[list[Place], list[Place]] = (
            [_split(text) for text in self.prefill],
            [(_url(text), None) for text in self.decode],
        )
        for name, pool in zip(("prefill", "decode"), written, strict=True):
            if not pool:
                raise ConfigError(f"the router needs at least one {name} URL")
            if len({url for url, _ in pool}) < len(pool):
                raise ConfigError(f"two {name} instances have the same URL")
        _check_apart(*written)
        spread = [[new for one in pool for new in _spread(*one, addresses or {})] for pool in written]
        _check_apart(*spread)
        prefill, decode = ([Instance(*one) for one in _once(pool).items()] for pool in spread)
        for instance in prefill:
            instance.probing = instance.address is None and mode is not Mode.PULL
        return prefill, decode


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

    def read(self) -> Listing:
        """Raises ConfigError, whose text names the file."""
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
            return Listing(*texts)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(f"pool file {self.path}: {error}") from error


@frozen(kw_only=True)
class Settings:
    """`mode` None: it may differ between requests, within `modes`, which are what the engines can do.

    `api_key` is asked of clients and shown to instances. Told to stop, the router gives open requests `drain_s`
    seconds. `listing` is who serves at the start; `pool_file` is looked at again and again, and so are the names in
    the listing.
    """

    listing: Listing
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


def _split(text: str) -> Place:
    url, separator, address = text.partition("=")
    if separator:
        parse_address(address)
    url = _url(url)
    if separator and names.is_name(url):
        raise ConfigError(f"{text!r}: one control address cannot be that of all instances behind a name")
    return url, address if separator else None


def _check_apart(prefill: Sequence[Place], decode: Sequence[Place]) -> None:
    if both := {url for url, _ in prefill} & {url for url, _ in decode}:
        raise ConfigError(f"{min(both)} stands in both pools: the router would let an instance move blocks to itself")


def _spread(url: str, address: str | None, known: Mapping[str, Sequence[str]]) -> list[Place]:
    """The place itself, or one for each address of a name."""
    return [(names.at(url, one), None) for one in known.get(url, ())] if names.is_name(url) else [(url, address)]


def _once(pool: Sequence[Place]) -> dict[str, str | None]:
    """An address of a name that is written down as well is one instance, and what was written of it holds."""
    places = dict(pool)
    return places | {url: address for url, address in pool if address is not None}


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https", names.SCHEME) and bool(parts.hostname) and parts.port != 0
        good = good and not parts.query and not parts.fragment and parts.username is None
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{text!r} is not a URL such as http://127.0.0.1:8100")
    return text.rstrip("/")
