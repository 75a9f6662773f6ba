"""DNS names in the pools: each address of a name is an instance, and the name is looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field

from kvx.address import format_address, parse_ip
from kvx.core.errors import ConfigError

SCHEME = "http+dns"
LOOKUP_S = 5.0
"""Pause between two lookups of a name. The system's resolver may remember an answer for longer."""
LIMIT_S = 10.0
"""A lookup that takes longer counts as failed until it ends."""
MAX_ADDRESSES = 1024
"""Addresses of one name."""
_log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""All IP addresses of a host name, in any order. Raises OSError where there are none, or no answer."""
Take = Callable[[str, Sequence[str]], None]
"""Makes the addresses of a name (its URL) part of the pools. Raises ConfigError where they cannot be."""


async def resolve(host: str) -> list[str]:
    """As the system does for this host, in a thread: its A and AAAA records, /etc/hosts, search domains."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_name(url: str) -> bool:
    """Whether it is looked up: `http+dns://NAME:PORT`."""
    return urlsplit(url).scheme == SCHEME


def at(url: str, address: str) -> str:
    """The URL of the instance at an `address` of the name in `url`."""
    parts = urlsplit(url)
    return parts._replace(scheme="http", netloc=format_address(address, parts.port or 80)).geturl()


@define(eq=False)
class Name:
    """One name, followed by a task of its own (`follow`).

    A failed lookup keeps the addresses of the last good one, and so does an empty answer: a name server that has just
    started says "no such name" of names that it will know in a second. An address that is really gone costs little,
    since each instance is looked at, and serves only while it answers.
    """

    url: str
    addresses: tuple[str, ...] = ()
    error: str = "not looked up yet"
    """Why the newest lookup changed nothing; empty: it did, or there was nothing to change."""
    _resolve: Resolve = field(default=resolve, kw_only=True)

    def status(self) -> dict[str, Any]:
        return {"url": self.url, "addresses": list(self.addresses), "error": self.error}

    async def follow(self, take: Take) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._look(take)
            await asyncio.sleep(LOOKUP_S)

    async def _look(self, take: Take) -> None:
        lookup = asyncio.ensure_future(self._resolve(urlsplit(self.url).hostname or ""))
        try:
            done, _ = await asyncio.wait([lookup], timeout=LIMIT_S)
            if not done:
                self._failed(f"no answer in {LIMIT_S:g} s")
                # The system's resolver cannot be interrupted. It has limits of its own, and while it
                # works no second thread is put beside it.
                await asyncio.wait([lookup])
            addresses = _usable(lookup.result())
            take(self.url, addresses)
        except (OSError, UnicodeError, ConfigError) as error:
            self._failed(str(error))
        else:
            self.addresses, self.error = addresses, ""
        finally:
            lookup.cancel()

    def _failed(self, error: str) -> None:
        if error != self.error:
            _log.warning("%s: %s; its instances stay the %d known ones", self.url, error, len(self.addresses))
        self.error = error


def _usable(found: Sequence[str]) -> tuple[str, ...]:
    """In a fixed order and once each. Raises ConfigError where there are none, or too many."""
    usable = tuple(sorted({text for text in found if parse_ip(text) is not None and "%" not in text}))
    if not usable:
        raise ConfigError("the name has no address")
    if len(usable) > MAX_ADDRESSES:
        raise ConfigError(f"the name has {len(usable)} addresses, more than {MAX_ADDRESSES}")
    return usable
