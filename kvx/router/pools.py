"""Both pools of a running router. Where they stand in a file, they become what the file says, without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from attrs import define, field

from kvx.core.errors import ConfigError
from kvx.router.pool import Instance, Lookout
from kvx.router.settings import PoolFile, Settings, Stamp

FILE_S = 1.0
"""Pause between two looks at the file."""
_log = logging.getLogger(__name__)


@define(eq=False)
class Pools:
    """Each instance is watched by a task of its own, from `open` until it leaves the pools or `close`.

    `error` says why the file's newest content is not in force; empty: it is.
    """

    settings: Settings
    prefill: Sequence[Instance] = field(init=False)
    decode: Sequence[Instance] = field(init=False)
    error: str = ""
    _lookout: Lookout | None = None
    _watches: dict[Instance, asyncio.Task[None]] = field(factory=dict)
    _follower: asyncio.Task[None] | None = None

    def __attrs_post_init__(self) -> None:
        self.prefill, self.decode = self.settings.prefill, self.settings.decode

    @property
    def instances(self) -> list[Instance]:
        return [*self.prefill, *self.decode]

    def find(self, url: str) -> Instance | None:
        """None: it has left the pools."""
        return next((one for one in self.instances if one.url == url), None)

    def open(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._watch()
        if (file := self.settings.pool_file) is not None:
            self._follower = asyncio.create_task(self._follow(file))

    async def close(self) -> None:
        tasks = [*self._watches.values(), *([self._follower] if self._follower else [])]
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

    async def _follow(self, file: PoolFile) -> None:
        # What was read before the start may have changed since: the first look reads again.
        seen: Stamp | None = None
        while True:
            stamp = await asyncio.to_thread(file.stamp)
            if stamp != seen or stamp is None:
                seen = stamp
                self._take(*await asyncio.to_thread(self._read, file))
            await asyncio.sleep(FILE_S)

    def _read(self, file: PoolFile) -> tuple[tuple[list[Instance], list[Instance]] | None, str]:
        try:
            return file.read(self.settings.mode), ""
        except ConfigError as error:
            return None, str(error)

    def _take(self, pools: tuple[list[Instance], list[Instance]] | None, error: str) -> None:
        if error and error != self.error:
            _log.warning("the pools stay as they are: %s", error)
        self.error = error
        if pools is not None:
            before = {one.url for one in self.instances}
            self.replace(*pools)
            after = {one.url for one in self.instances}
            if before != after:
                told = [f"+{url}" for url in sorted(after - before)] + [f"-{url}" for url in sorted(before - after)]
                _log.warning("the pools have changed: %s", ", ".join(told))
