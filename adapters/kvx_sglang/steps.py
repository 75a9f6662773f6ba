"""A decode rank's rooms driven without SGLang, for `kvx bench callbacks`.

In each step SGLang's decode scheduler polls its requests that wait for their cache, and each poll takes kvx's news
(`KvxReceiver.poll`). What SGLang's own base classes do in a poll is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvx.bench.cache import BLOCK_TOKENS, Cache
from kvx.config import Options
from kvx.core.errors import TransportError
from kvx.engine import EngineInstance
from kvx_sglang.layout import Buffer, Facts, describe
from kvx_sglang.rooms import DecodeRooms, Ended

POLLED = 8
"""Requests that SGLang polls in each step."""
AUX_BYTES = 1024


class SglangSteps:
    """See `kvx.bench.callbacks.Steps`."""

    def __init__(self, cache: Cache) -> None:
        layers, blocks, block_bytes = cache.shape
        self._aux = np.zeros((blocks, AUX_BYTES), dtype=np.uint8)
        kv = tuple(Buffer(cache[layer].ctypes.data, blocks * block_bytes, block_bytes) for layer in range(layers))
        aux = (Buffer(self._aux.ctypes.data, self._aux.nbytes, AUX_BYTES),)
        self._pools = describe(Facts("bench", "bytes", BLOCK_TOKENS, kv, aux, sliced=False))
        self.layout = self._pools.layout
        self.regions = self._pools.regions
        self._ended: list[int] = []

    def start(self, instance: EngineInstance, options: Options) -> None:
        self._instance = instance
        self._rooms = DecodeRooms(instance.put, self._pools, instance.info.epoch, options.lease_s)

    def hold(self, count: int, block: int, address: str) -> None:
        """Pages that are open to a prefill side which has no request for them."""
        for number in range(count):
            self._rooms.expose(number, address, 0, [block], block, ())

    def load(self, number: int, blocks: Sequence[int], address: str) -> None:
        self._rooms.expose(number, address, 0, list(blocks), 0, ())

    def step(self) -> int:
        changes = []
        for _ in range(POLLED):
            changes += self._rooms.take(self._instance.news())
        for change in changes:
            assert isinstance(change, Ended)
            if not change.ok:
                raise TransportError(f"a load has failed: {change.detail}")
            self._ended.append(change.room)
        return len(changes)

    def leave(self) -> None:
        for room in self._ended:
            self._rooms.close(room, "")
        self._ended.clear()
