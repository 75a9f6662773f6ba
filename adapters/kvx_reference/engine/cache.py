"""The paged KV cache: one array, a pool of its blocks, and finding prefixes that were computed before."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvx_reference.engine.config import ModelConfig

Floats = NDArray[np.float32]


class KvCache:
    """Keys and values of all layers in one array `[layer][block][token][head][key, then value]`, float32."""

    def __init__(self, config: ModelConfig, blocks: int, block_size: int) -> None:
        shape = (config.layers, blocks, block_size, config.kv_heads, 2 * config.head_dim)
        self.array: Floats = np.zeros(shape, dtype=np.float32)
        self.blocks = blocks
        self.block_size = block_size
        self._slots = self.array.reshape(config.layers, blocks * block_size, config.kv_heads, 2 * config.head_dim)

    def write(self, layer: int, slots: NDArray[np.int64], keys: Floats, values: Floats) -> None:
        """Store one row per slot; a slot is `block * block_size + offset`."""
        self._slots[layer, slots] = np.concatenate((keys, values), axis=-1)

    def read(self, layer: int, slots: NDArray[np.int64]) -> Floats:
        """What stands in the slots, in their shape, then `[head][key, then value]`."""
        found: Floats = self._slots[layer, slots]
        return found


def block_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block: of its tokens and, through the hash of the block before it, of the whole prefix."""
    return hashlib.blake2b(before + np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


def salt_hash(salt: str) -> bytes:
    """What stands before the first block. Requests of different salt share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


class BlockPool:
    """Who uses which block.

    A block has a count of references and is free at zero. A free block keeps its content, and can
    be found by its hash, until it is allocated again: the one that was freed first goes first.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._of_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._holds: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Blocks with one reference each and without content; None if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._of_hash[known]
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a free block is taken out of the free ones with its content."""
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each. The last blocks are reused first: heads of prefixes are worth more."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
            elif self._references[block] < 0:
                raise ValueError(f"block {block} was freed twice")

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, without a reference yet."""
        blocks = []
        for wanted in hashes:
            block = self._of_hash.get(wanted)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def remember(self, block: int, known: bytes) -> None:
        """The content of a block is complete and can be found. The first block of a content keeps the name."""
        if known not in self._of_hash and block not in self._hash_of:
            self._of_hash[known] = block
            self._hash_of[block] = known

    # A connector's references, by a name of its own.

    def hold(self, key: str, blocks: Sequence[int]) -> None:
        """Keep blocks out of the free ones until `drop(key)`, whatever happens to their request."""
        self.share(blocks)
        self._holds.setdefault(key, []).extend(blocks)

    def drop(self, key: str) -> None:
        self.release(self._holds.pop(key, []))

    @property
    def held(self) -> int:
        """How many references connectors have."""
        return sum(map(len, self._holds.values()))

    def in_use(self) -> Counter[int]:
        """References by block, of those that have any."""
        return Counter({block: count for block, count in enumerate(self._references) if count})
