"""Both pools of a running router. They follow their file, and the DNS names in it, without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from kvx.core.errors import ConfigError
from kvx.router.names import Name
from kvx.router.pool import Instance, Lookout
from kvx.router.settings import Listing, PoolFile, Settings, Stamp

FILE_S = 1.0
"""Pause between two looks at the file."""
_log = logging.getLogger(__name__)


@define(eq=False)
class Pools:
    """Each instance is watched by a task of its own, from `open` until it leaves the pools or `close`.

    `error` says why the file's newest content is not in force; empty: it is. `names` are those that are looked up,
    by their URLs.
    """

    settings: Settings
    prefill: Sequence[Instance] = field(init=False)
    decode: Sequence[Instance] = field(init=False)
    error: str = ""
    names: dict[str, Name] = field(factory=dict)
    _listing: Listing = field(init=False)
    _lookout: Lookout | None = None
    _watches: dict[Instance, asyncio.Task[None]] = field(factory=dict)
    _lookups: dict[Name, asyncio.Task[None]] = field(factory=dict)
    _follower: asyncio.Task[None] | None = None

    def __attrs_post_init__(self) -> None:
        self._listing = self.settings.listing
        self.prefill, self.decode = self._listing.instances(self.settings.mode)

    @property
    def instances(self) -> list[Instance]:
        return [*self.prefill, *self.decode]

    def find(self, url: str) -> Instance | None:
        """None: it has left the pools."""
        return next((one for one in self.instances if one.url == url), None)

    def lookups(self) -> list[dict[str, Any]]:
        """What is known of each name, and in which pool it stands."""
        return [{"pool": pool, **self.names[url].status()} for url, pool in self._listing.names.items()]

    def open(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._adopt(self._listing)
        if (file := self.settings.pool_file) is not None:
            self._follower = asyncio.create_task(self._follow(file))

    async def close(self) -> None:
        tasks = [*self._lookups.values(), *self._watches.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def replace(self, prefill: Sequence[Instance], decode: Sequence[Instance]) -> None:
        """Who stays keeps its state and open legs; who goes gets nothing new, and its open legs go on."""
        known = {one.url: one for one in self.instances}

        def kept(new: Instance) -> Instance:
            old = known.get(new.url)
            return old if old is not None and old.is_set_up_as(new) else new

        self.prefill, self.decode = [kept(one) for one in prefill], [kept(one) for one in decode]
        self._watch()
        after = {one.url for one in self.instances}
        if known.keys() != after:
            told = [f"+{url}" for url in sorted(after - known.keys())]
            told += [f"-{url}" for url in sorted(known.keys() - after)]
            _log.warning("the pools have changed: %s", ", ".join(told))

    def _watch(self) -> None:
        lookout = self._lookout
        if lookout is None:
            return
        now = self.instances
        for gone in [one for one in self._watches if one not in now]:
            self._watches.pop(gone).cancel()
        for new in [one for one in now if one not in self._watches]:
            self._watches[new] = asyncio.create_task(new.watch(lookout))
        lookout.changed()

    def _adopt(self, listing: Listing) -> None:
        """Raises ConfigError; then nothing has changed."""
        names = {url: self.names.get(url) or Name(url) for url in listing.names}
        found = {url: name.addresses for url, name in names.items()}
        self.replace(*listing.instances(self.settings.mode, found))
        self._listing, self.names = listing, names
        for gone in [one for one in self._lookups if one not in names.values()]:
            self._lookups.pop(gone).cancel()
        for new in [one for one in names.values() if one not in self._lookups]:
            self._lookups[new] = asyncio.create_task(new.follow(self._found))

    def _found(self, url: str, addresses: Sequence[str]) -> None:
        """Raises ConfigError; then nothing has changed."""
        found: Mapping[str, Sequence[str]] = {one: name.addresses for one, name in self.names.items()}
        self.replace(*self._listing.instances(self.settings.mode, {**found, url: addresses}))

    async def _follow(self, file: PoolFile) -> None:
        # What was read before the start may have changed since: the first look reads again.
        seen: Stamp | None = None
        while True:
            stamp = await asyncio.to_thread(file.stamp)
            if stamp != seen or stamp is None:
                seen = stamp
                try:
                    self._adopt(await asyncio.to_thread(file.read))
                    self.error = ""
                except ConfigError as error:
                    self._failed(str(error))
            await asyncio.sleep(FILE_S)

    def _failed(self, error: str) -> None:
        if error != self.error:
            _log.warning("the pools stay as they are: %s", error)
        self.error = error
