"""References of kvx's own to blocks of vLLM's pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PoolPins:
    """References to blocks of vLLM's pool, taken and given back as prefix sharing does it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[str, list[Any]] = {}
        self._count = 0

    def hold(self, transfer: str, blocks: Iterable[int]) -> None:
        found = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(found)
        self._held.setdefault(transfer, []).extend(found)
        self._count += len(found)

    def drop(self, transfer: str) -> None:
        blocks = self._held.pop(transfer, [])
        self._count -= len(blocks)
        # In reverse, so that vLLM evicts a prompt's tail before its head.
        self._pool.free_blocks(reversed(blocks))

    @property
    def held(self) -> int:
        """Counted as they come and go: the scheduler asks in each step, with thousands of transfers open."""
        return self._count

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def total(self) -> int:
        # One is vLLM's null block, which is never given out.
        return int(self._pool.num_gpu_blocks) - 1
