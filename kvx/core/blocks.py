"""One side's own blocks of a request: bounds, positions, and what has been handed over.

Everything that is decided from one layout and a prompt's length; what two layouts have to do
with one another is in `kvx.core.layout`, which also exports these names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvx.core.errors import LocalProtocolError
from kvx.core.model import BlockTable, CacheGroup, Layout, Part

Ints = NDArray[np.int64]
_FEW = 16
"""Numbers of which there is one in so many possible ones are sorted, more of them are counted, which is faster."""


def check_blocks(layout: Layout, first: Sequence[int], blocks: BlockTable, tokens: int) -> str | None:
    """What is out of bounds in blocks of `layout` that are to be a prompt's tail, or None.

    `first` gives per group the position of the first block; a group of no blocks is always
    allowed, otherwise its blocks end with the prompt of `tokens` tokens.
    """
    if not len(layout.groups) == len(first) == len(blocks.groups):
        return f"{len(first)} positions and {len(blocks.groups)} block lists for {len(layout.groups)} groups"
    for group, start, ids in zip(layout.groups, first, blocks.groups, strict=True):
        end = _end(group, tokens)
        try:
            numbered(ids, layout.num_blocks)
        except ValueError as flaw:
            return f"groups[{group.index}]: {flaw}"
        if not 0 <= start <= end - len(ids) or (ids and start + len(ids) != end):
            return f"groups[{group.index}]: {len(ids)} blocks from position {start} do not end at {end}"
    return None


def numbered(ids: Sequence[int], num_blocks: int) -> Ints:
    """The block ids of one group. Raises ValueError where one is out of bounds or comes twice."""
    try:
        numbers = np.fromiter(ids, np.int64, len(ids))
    except OverflowError:
        raise ValueError(f"block ids {min(ids)}..{max(ids)} are not all below {num_blocks}") from None
    if not len(numbers):
        return numbers
    low, high = int(numbers.min()), int(numbers.max())
    if not 0 <= low <= high < num_blocks:
        raise ValueError(f"block ids {low}..{high} are not all below {num_blocks}")
    if len(numbers) * _FEW < high:
        ordered = np.sort(numbers)
        twice = bool((ordered[1:] == ordered[:-1]).any())
    else:
        present = np.zeros(high + 1, bool)
        present[numbers] = True
        twice = int(np.count_nonzero(present)) < len(numbers)
    if twice:
        raise ValueError("a block comes twice")
    return numbers


def order(numbers: Ints, many: int) -> Ints:
    """What sorts these distinct numbers below `many`: by counting where they are not few of them."""
    if len(numbers) * _FEW < many:
        return np.argsort(numbers)
    place = np.full(many, -1)
    place[numbers] = np.arange(len(numbers))
    return place[place >= 0]


def window(first: Sequence[int], owner: Layout, other: Layout, tokens: int) -> tuple[int, ...]:
    """First positions per group, given in the owner's blocks, in blocks of the other side.

    Rounded down to whole blocks. A position behind the owner's last block ("nothing")
    becomes the one behind the other side's last block.
    """
    return tuple(
        _end(there, tokens) if start >= _end(here, tokens) else start * here.block_size // there.block_size
        for start, here, there in zip(first, owner.groups, other.groups, strict=True)
    )


def _end(group: CacheGroup, tokens: int) -> int:
    return -(-tokens // group.block_size)


class _Spans:
    """A set of positions as sorted, disjoint, not touching half-open ranges."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def overlaps(self, low: int, high: int) -> bool:
        return any(low < stop and start < high for start, stop in self._ranges)

    def add(self, low: int, high: int) -> None:
        apart = []
        for start, stop in self._ranges:
            if stop < low or high < start:
                apart.append((start, stop))
            else:
                low, high = min(low, start), max(high, stop)
        self._ranges = sorted([*apart, (low, high)])

    def tail(self, end: int) -> int:
        """The smallest position from which on everything before `end` is in the set."""
        return self._ranges[-1][0] if self._ranges and self._ranges[-1][1] == end else end

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._ranges)


@define(eq=False)
class Coverage:
    """What one side has handed over so far of its own blocks for a prompt of `tokens` tokens."""

    layout: Layout
    tokens: int
    _layers: dict[str, _Spans] = field(init=False)
    _groups: list[_Spans] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._layers = {layer.name: _Spans() for group in self.layout.groups for layer in group.layers}
        self._groups = [_Spans() for _ in self.layout.groups]

    def add(self, part: Part) -> None:
        """Note a part. Raises LocalProtocolError, and changes nothing, if it cannot be right.

        That is: an unknown layer, another number of groups, a block id out of bounds or given
        twice, a position behind the prompt, or one that its layer has had before.
        """
        groups = self.layout.groups
        if not len(part.first) == len(part.blocks.groups) == len(groups):
            raise LocalProtocolError(f"a part has {len(part.blocks.groups)} block lists for {len(groups)} groups")
        named = self._layers.keys() if part.layers is None else set(part.layers)
        if unknown := named - self._layers.keys():
            raise LocalProtocolError(f"this rank has no layer {min(unknown)!r}")
        added: list[tuple[_Spans, int, int]] = []
        for group, start, ids, whole in zip(groups, part.first, part.blocks.groups, self._groups, strict=True):
            stop = start + len(ids)
            try:
                numbered(ids, self.layout.num_blocks)
            except ValueError as flaw:
                raise LocalProtocolError(f"groups[{group.index}]: {flaw}") from flaw
            if not ids:
                continue
            if not 0 <= start < stop <= _end(group, self.tokens):
                raise LocalProtocolError(f"groups[{group.index}]: positions {start}..{stop - 1} are not in the prompt")
            layers = [layer.name for layer in group.layers if layer.name in named]
            for name in layers:
                if self._layers[name].overlaps(start, stop):
                    raise LocalProtocolError(f"layer {name!r} had some of positions {start}..{stop - 1} before")
            if layers or not group.layers:
                added += [(spans, start, stop) for spans in (whole, *(self._layers[name] for name in layers))]
        for spans, start, stop in added:
            spans.add(start, stop)

    def first(self) -> tuple[int, ...]:
        """Per group the position from which on all its layers are complete; behind the last one if none is.

        A group of which this rank has no layer counts with the blocks alone.
        """
        tails = []
        for group, whole in zip(self.layout.groups, self._groups, strict=True):
            spans = [whole, *(self._layers[layer.name] for layer in group.layers)]
            tails.append(max(span.tail(_end(group, self.tokens)) for span in spans))
        return tuple(tails)

    @property
    def blocks(self) -> int:
        """The number of blocks of which at least one layer was handed over."""
        return sum(map(len, self._groups))
