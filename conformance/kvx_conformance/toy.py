"""Small caches whose every byte is known: patterned blocks, and a pool that poisons what it gets back.

One cell (the keys or values of one token and head in one layer) is a 32-bit word that only this
content, layer, head and token has. Memory that nobody owns holds poison, so a byte that comes
late is seen either in the act (the writer asks `Pool.owner`) or at the next allocation.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from kvx.core.events import Digest
from kvx.core.model import BlockTable, CacheGroup, Descriptors, LayerSpec, Layout, Packing

CELL_BYTES = 4
POISON = 0xDEADBEEF

Words = NDArray[np.uint32]


@frozen
class Model:
    """What producer and consumer must have in common; `layers` are the layer names of each group."""

    groups: tuple[tuple[str, ...], ...]
    total_heads: int
    packing: Packing
    replicated: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Model:
        replicated = rng.random() < 0.15
        names = ("full", "window")[: rng.choice((1, 1, 1, 2))]
        groups = tuple(tuple(f"{name}.{i}" for i in range(rng.choice((1, 2, 2, 3)))) for name in names)
        packing = rng.choice((Packing.HEADS, Packing.HEADS_TOKENS, Packing.HEADS_TOKENS, Packing.TOKENS_HEADS))
        return cls(groups, rng.choice((1, 2, 2, 4)), packing, replicated)

    def layouts(self, rng: random.Random, blocks: int) -> tuple[Layout, ...]:
        """The layouts of all ranks of one instance, one to three of them."""
        sizes = (4,) if self.packing is Packing.HEADS else (2, 4, 4, 8)
        base = rng.choice(sizes)
        layers = [name for group in self.groups for name in group]
        pp = 2 if len(layers) > 1 and rng.random() < 0.12 else 1
        tp = 1 if pp > 1 else rng.choice((1, 1, 2, 2, 3))
        if self.total_heads > tp and self.total_heads % tp and not self.replicated:
            tp = 2 if self.total_heads % 2 == 0 else 1
        cut = rng.randrange(1, len(layers)) if pp > 1 else 0
        stages = (tuple(layers[:cut]), tuple(layers[cut:])) if pp > 1 else ()
        return tuple(self._layout(base, blocks, rank, tp, pp, stages) for rank in range(tp * pp))

    def _layout(
        self, block_size: int, blocks: int, rank: int, tp: int, pp: int, stages: tuple[tuple[str, ...], ...]
    ) -> Layout:
        heads = self.total_heads if self.replicated else max(1, self.total_heads // tp)
        offset, groups = 0, []
        for index, names in enumerate(self.groups):
            specs = []
            for name in names:
                if not stages or name in stages[rank // tp]:
                    size = block_size * heads * CELL_BYTES
                    specs.append(LayerSpec(name, 0, offset, size, size))
                    offset += size * blocks
            groups.append(
                CacheGroup(
                    index, "toy", block_size, tuple(specs), heads, self.total_heads, self.packing, self.replicated
                )
            )
        return Layout("toy", "u32", "sim", tuple(groups), blocks, rank % tp, tp, rank // tp, pp, stages=stages)


class Cache:
    """The KV memory of one rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        words = sum(layer.block_bytes for group in layout.groups for layer in group.layers) * layout.num_blocks
        self._words: Words = np.full(words // CELL_BYTES, POISON, dtype=np.uint32)
        self.memory = self._words.view(np.uint8).data
        self.block_at = np.zeros(len(self._words), dtype=np.int64)
        """Block id of each word."""
        self._layers: dict[str, Words] = {}
        self._seeds: dict[str, int] = {}
        for group in layout.groups:
            tokens_heads = group.packing is Packing.TOKENS_HEADS
            shape = (group.block_size, group.heads) if tokens_heads else (group.heads, group.block_size)
            for layer in group.layers:
                size = layer.block_bytes // CELL_BYTES
                start = layer.offset // CELL_BYTES
                stop = start + size * layout.num_blocks
                self._layers[layer.name] = self._words[start:stop].reshape(layout.num_blocks, *shape)
                self.block_at[start:stop] = np.repeat(np.arange(layout.num_blocks), size)
                self._seeds[layer.name] = zlib.crc32(layer.name.encode())

    def truth(self, content: int, group: CacheGroup, layer: str, positions: Sequence[int]) -> Words:
        """What the blocks at these positions of the request hold, shaped like the pool."""
        first = 0 if group.replicated else self.layout.tp_rank * group.total_heads // self.layout.tp_size
        heads = np.arange(first, first + group.heads)
        tokens = np.asarray(positions)[:, None] * group.block_size + np.arange(group.block_size)
        if group.packing is Packing.TOKENS_HEADS:
            cells = tokens[:, :, None] * 64 + heads[None, None, :]
        else:
            cells = tokens[:, None, :] * 64 + heads[None, :, None]
        seed = content * 0x9E3779B1 + self._seeds[layer]
        mixed: Words = ((cells + 1) * 0x85EBCA6B ^ (seed & 0x7FFFFFFF)).astype(np.uint32)
        return mixed

    def fill(self, content: int, first: Sequence[int], blocks: BlockTable, layers: Iterable[str] | None) -> None:
        """Compute: write the true cells of these blocks."""
        wanted = self._layers.keys() if layers is None else set(layers)
        for group, start, ids in zip(self.layout.groups, first, blocks.groups, strict=True):
            for layer in group.layers:
                if ids and layer.name in wanted:
                    positions = range(start, start + len(ids))
                    self._layers[layer.name][list(ids)] = self.truth(content, group, layer.name, positions)

    def flaws(self, content: int, first: Sequence[int], blocks: BlockTable, tokens: int) -> list[str]:
        """Which of these blocks do not hold the truth, as far as the prompt of `tokens` tokens reaches."""
        found = []
        for group, start, ids in zip(self.layout.groups, first, blocks.groups, strict=True):
            if not ids:
                continue
            size = group.block_size
            inside = np.arange(start * size, (start + len(ids)) * size).reshape(len(ids), size) < tokens
            mask = inside[:, :, None] if group.packing is Packing.TOKENS_HEADS else inside[:, None, :]
            for layer in group.layers:
                there = self._layers[layer.name][list(ids)]
                wrong = (there != self.truth(content, group, layer.name, range(start, start + len(ids)))) & mask
                if wrong.any():
                    bad = [ids[i] for i in np.flatnonzero(wrong.reshape(len(ids), -1).any(axis=1))]
                    found.append(f"layer {layer.name}: blocks {bad} of {list(ids)}")
        return found

    def poison(self, blocks: Iterable[int]) -> None:
        ids = list(blocks)
        for layer in self._layers.values():
            layer[ids] = POISON

    def poisoned(self, block: int) -> bool:
        return all(bool((layer[block] == POISON).all()) for layer in self._layers.values())

    def blocks_of(self, pieces: Iterable[tuple[int, int]]) -> set[int]:
        """Ids of the blocks that these (offset, length) in bytes touch."""
        found: set[int] = set()
        for offset, length in pieces:
            low, high = offset // CELL_BYTES, -(-(offset + length) // CELL_BYTES)
            found.update(self.block_at[low:high].tolist())
        return found

    def digest(self, action: Digest) -> str:
        """Order-independent sum over (key, CRC-32) of each piece."""
        total = 0
        for pieces, keys in action.units:
            for (_, offset, length), key in zip(pieces.pieces(), keys.tolist(), strict=True):
                crc = zlib.crc32(self.memory[offset : offset + length])
                total += zlib.crc32(f"{key}:{crc}".encode()) * (crc + 1)
        return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


@define
class Pool:
    """The blocks of one instance; a block id means the same place on all its ranks."""

    caches: tuple[Cache, ...]
    free: list[int]
    owner: dict[int, str] = field(factory=dict)
    reuses: int = 0
    """How often a block was taken that another request had had."""
    _used: set[int] = field(factory=set)

    @classmethod
    def of(cls, caches: tuple[Cache, ...]) -> Pool:
        return cls(caches, list(range(caches[0].layout.num_blocks)))

    @property
    def size(self) -> int:
        return self.caches[0].layout.num_blocks

    def take(self, owner: str, counts: Sequence[int], rng: random.Random) -> BlockTable | None:
        """Blocks per group, freed ones first and in no order; None if there are too few."""
        if sum(counts) > len(self.free):
            return None
        taken = [self.free.pop() for _ in range(sum(counts))]
        self.reuses += len(self._used.intersection(taken))
        self._used.update(taken)
        rng.shuffle(taken)
        self.owner.update(dict.fromkeys(taken, owner))
        table, start = [], 0
        for count in counts:
            table.append(taken[start : start + count])
            start += count
        return BlockTable.of(*table)

    def spoiled(self, blocks: BlockTable) -> list[int]:
        """Blocks just taken in which something was written while they were free."""
        ids = chain.from_iterable(blocks.groups)
        return [block for block in ids if not all(cache.poisoned(block) for cache in self.caches)]

    def give_back(self, blocks: BlockTable) -> None:
        """Poison and reuse at once: the last ones given back are the first ones taken."""
        ids = list(chain.from_iterable(blocks.groups))
        for cache in self.caches:
            cache.poison(ids)
        for block in ids:
            del self.owner[block]
        self.free += ids


def covered(piece: tuple[int, int, int], ranges: Descriptors) -> bool:
    """Whether one (region, offset, length) lies inside one of the ranges."""
    region, offset, length = piece
    stop = offset + length
    return any(region == where and low <= offset and stop <= low + size for where, low, size in ranges.pieces())
