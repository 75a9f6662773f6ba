"""The planner: which ranks exchange data, and which bytes of their blocks.

Pure functions of two layouts and of block tables. A leg moves *pieces*: the largest ranges
that are contiguous inside one block on both sides. Loops run over groups and layers of a
layout; everything that grows with a request is a numpy array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from attrs import field, frozen

from kvx.core.blocks import Coverage, Ints, check_blocks, numbered, order, window
from kvx.core.errors import LayoutMismatch, LocalProtocolError
from kvx.core.model import CacheGroup, Descriptors, LayerSpec, Layout, Packing, Part, Role

__all__ = ["Coverage", "LegPlan", "Pair", "check", "check_blocks", "pairs", "plan_leg", "window"]


MAX_RANKS = 65536
MAX_POSITION = 2**40
MAX_EXTENT = 2**62
"""Bytes of one layer. With these bounds no position and no offset overflows an int64."""


# ------------------------------------------------------------------------------- checks


def check(producer: Layout, consumer: Layout) -> None:
    """Raise LayoutMismatch unless blocks can move between these two layouts.

    The error names the first fact that must be equal and is not, or the first one that
    cannot be mapped. Any rank's layout may stand for its instance; layer by layer only those
    that both arguments hold are compared.
    """
    flaws = _flaw(producer), _flaw(consumer)
    if any(flaws):
        raise LayoutMismatch("soundness", flaws[0] or "sound", flaws[1] or "sound")
    theirs = consumer.facts()
    for fact, value in producer.facts().items():
        if theirs[fact] != value:
            raise LayoutMismatch(fact, value, theirs[fact])
    names = [set(chain.from_iterable(_stages(layout))) for layout in (producer, consumer)]
    if names[0] != names[1]:
        raise LayoutMismatch("layers", sorted(names[0] - names[1])[:4], sorted(names[1] - names[0])[:4])
    for mine, other in zip(producer.groups, consumer.groups, strict=True):
        _check_group(mine, other)
    layers = {layer.name: (group, layer) for group in consumer.groups for layer in group.layers}
    for group in producer.groups:
        for layer in group.layers:
            if layer.name in layers:
                _check_layer(group, layer, *layers[layer.name])


def _flaw(layout: Layout) -> str | None:
    """What makes this layout impossible in itself, or None."""
    if layout.tp_rank >= layout.tp_size or layout.pp_rank >= layout.pp_size or layout.ranks > MAX_RANKS:
        return f"tp {layout.tp_rank}/{layout.tp_size}, pp {layout.pp_rank}/{layout.pp_size} is no rank"
    if len(layout.stages) != (layout.pp_size if layout.pp_size > 1 else 0):
        return f"{len(layout.stages)} stages of {layout.pp_size}"
    staged = [*chain.from_iterable(_stages(layout))]
    own = [layer.name for group in layout.groups for layer in group.layers]
    if len(set(staged)) != len(staged) or len(set(own)) != len(own):
        return "a layer name comes twice"
    if set(own) != set(_stages(layout)[layout.pp_rank]):
        return f"layers of the groups and of stage {layout.pp_rank} differ"
    for position, group in enumerate(layout.groups):
        if group.index != position:
            return f"groups[{position}] has index {group.index}"
        sharers = 1 if group.replicated else layout.tp_size
        if group.total_heads > sharers and group.total_heads % sharers:
            return f"groups[{position}]: {group.total_heads} heads cannot be shared by {sharers} ranks"
        if group.heads != max(1, group.total_heads // sharers):
            return f"groups[{position}].heads is {group.heads} of {group.total_heads} shared by {sharers}"
        for layer in group.layers:
            extent = layer.offset + layer.stride * layout.num_blocks
            if not 0 < layer.block_bytes <= layer.stride or extent > MAX_EXTENT:
                return f"layer {layer.name!r}: {layer.block_bytes} bytes each {layer.stride}"
    return None


def _check_group(producer: CacheGroup, consumer: CacheGroup) -> None:
    at = f"groups[{producer.index}]."
    sizes = producer.block_size, consumer.block_size
    whole = f"packing {producer.packing.value} cannot be cut"
    if max(sizes) % min(sizes):
        raise LayoutMismatch(at + "block_size (neither is a multiple of the other)", *sizes)
    if sizes[0] != sizes[1] and producer.packing in (Packing.WHOLE, Packing.HEADS):
        raise LayoutMismatch(f"{at}block_size ({whole} between tokens)", *sizes)
    if producer.heads != consumer.heads and producer.packing is Packing.WHOLE:
        raise LayoutMismatch(f"{at}heads ({whole} between heads)", producer.heads, consumer.heads)


def _check_layer(group: CacheGroup, layer: LayerSpec, other: CacheGroup, twin: LayerSpec) -> None:
    if group.index != other.index:
        raise LayoutMismatch(f"group of layer {layer.name!r}", group.index, other.index)
    cells = _grid(group, other).cells, _grid(other, group).cells
    uneven = layer.block_bytes % cells[0] or twin.block_bytes % cells[1]
    if uneven or layer.block_bytes * cells[1] != twin.block_bytes * cells[0]:
        sizes = [f"{spec.block_bytes} in {n}" for spec, n in zip((layer, twin), cells, strict=True)]
        raise LayoutMismatch(f"bytes and pieces of a block of layer {layer.name!r}", *sizes)


# -------------------------------------------------------------------------------- pairs


@frozen(order=True)
class Pair:
    """Two ranks that have a leg of each transfer. An empty one moves nothing, it only releases."""

    producer: int
    consumer: int
    empty: bool


def pairs(producer: Layout, consumer: Layout) -> tuple[Pair, ...]:
    """Every leg between two instances, sorted; the same from any rank's layouts (R6).

    Each consumer rank gets each head of each of its layers from exactly one producer rank;
    where several hold it they take turns. A rank of either side without any data has an empty
    pair with the rank that faces it. Where both sides have pipeline stages the group of a
    foreign layer is not known: a pair that any group would need then counts as not empty.
    Raises LayoutMismatch.
    """
    check(producer, consumer)
    links = [_sources(group, producer.tp_size, consumer.tp_size).links for group in producer.groups]
    known = next((layout for layout in (producer, consumer) if layout.pp_size == 1), None)
    groups = {layer.name: (group.index,) for group in known.groups for layer in group.layers} if known else {}
    anyone = tuple(range(len(links)))
    there = {name: stage for stage, names in enumerate(_stages(consumer)) for name in names}
    shared = {
        (stage, there[name], group)
        for stage, names in enumerate(_stages(producer))
        for name in names
        for group in groups.get(name, anyone)
    }
    full = {
        (stage * producer.tp_size + rank, other * consumer.tp_size + peer)
        for stage, other, group in shared
        for rank, peer in links[group]
    }
    busy, served = {rank for rank, _ in full}, {rank for _, rank in full}
    empty = {(rank, _facing(rank, producer, consumer)) for rank in range(producer.ranks) if rank not in busy}
    empty |= {(_facing(rank, consumer, producer), rank) for rank in range(consumer.ranks) if rank not in served}
    return tuple(sorted([Pair(*ranks, empty=False) for ranks in full] + [Pair(*ranks, empty=True) for ranks in empty]))


def _facing(rank: int, here: Layout, there: Layout) -> int:
    """The rank of the other instance that stands where this one does, both spread evenly."""
    stage, position = divmod(rank, here.tp_size)
    return stage * there.pp_size // here.pp_size * there.tp_size + position * there.tp_size // here.tp_size


def _stages(layout: Layout) -> tuple[tuple[str, ...], ...]:
    return layout.stages or (tuple(layer.name for group in layout.groups for layer in group.layers),)


@frozen(eq=False)
class _Sources:
    """Who gets which head from whom: three arrays, one entry for each head of each consumer."""

    producer: Ints
    consumer: Ints
    head: Ints

    @property
    def links(self) -> set[tuple[int, int]]:
        return set(zip(self.producer.tolist(), self.consumer.tolist(), strict=True))


def _sources(group: CacheGroup, producers: int, consumers: int) -> _Sources:
    """Sources of all TP ranks of one stage. A replicated group is one head that everybody holds."""
    heads = 1 if group.replicated else group.total_heads
    consumer = np.arange(max(heads, consumers)) * consumers // max(heads, consumers)
    head = np.arange(max(heads, consumers)) * heads // max(heads, consumers)
    start, stop = _holders(head, heads, producers)
    first, last = _holders(head, heads, consumers)
    return _Sources(start + (consumer - first) * (stop - start) // (last - first), consumer, head)


def _holders(head: Ints, heads: int, ranks: int) -> tuple[Ints, Ints]:
    """The half-open range of the ranks that hold each head."""
    if heads >= ranks:
        rank = head * ranks // heads
        return rank, rank + 1
    return -(-head * ranks // heads), -(-(head + 1) * ranks // heads)


# --------------------------------------------------------------------------------- legs


@frozen(eq=False)
class _Grid:
    """How blocks of one side of a group are cut into pieces.

    A block has `cells` cells of equal size, the unit of the other numbers. It is made of the
    units of the smaller block size, `step` cells apart; `inner` gives the start of each piece in
    a unit, and each piece has `length` cells. Pieces of both sides correspond one by one.
    """

    ratio: int
    cells: int
    step: int
    inner: Ints
    length: int


def _grid(group: CacheGroup, other: CacheGroup, head: int = 0, count: int = 1) -> _Grid:
    """Cut heads [head, head + count) of this rank's heads out of its blocks, in pieces as large as can be."""
    unit = min(group.block_size, other.block_size)
    ratio = group.block_size // unit
    tokens_heads = group.packing is Packing.TOKENS_HEADS
    same_size = group.block_size == other.block_size
    if group.heads == other.heads and (same_size or tokens_heads):
        return _Grid(ratio, cells=ratio, step=1, inner=np.zeros(1, np.int64), length=1)
    if tokens_heads:
        inner = np.arange(unit) * group.heads + head
        return _Grid(ratio, cells=group.block_size * group.heads, step=unit * group.heads, inner=inner, length=count)
    if same_size:
        return _Grid(ratio, cells=group.heads, step=0, inner=np.array([head]), length=count)
    inner = (head + np.arange(count)) * ratio
    return _Grid(ratio, cells=group.heads * ratio, step=1, inner=inner, length=1)


@frozen(eq=False)
class _Side:
    """One side of one group in a leg; the arrays have one entry per layer. `cell` in bytes."""

    group: int
    grid: _Grid
    num_blocks: int
    region: Ints
    offset: Ints
    stride: Ints
    cell: Ints

    @property
    def dense(self) -> bool:
        """Whether neighbours in the pool are neighbours in memory, so that a run of units is one piece."""
        whole = self.grid.cells == self.grid.ratio * self.grid.length
        return whole and bool((self.stride == self.cell * self.grid.cells).all())

    @classmethod
    def of(cls, layout: Layout, group: int, grid: _Grid, layers: Sequence[LayerSpec]) -> _Side:
        facts = [(layer.region, layer.offset, layer.stride, layer.block_bytes // grid.cells) for layer in layers]
        return cls(group, grid, layout.num_blocks, *np.array(facts, np.int64).T.copy())

    def span(self, part: Part) -> tuple[int, int]:
        """The positions of a part, half-open, in units."""
        first, count = part.first[self.group], len(part.blocks.groups[self.group])
        return first * self.grid.ratio, (first + count) * self.grid.ratio

    def lookup(self, part: Part, positions: Ints) -> Ints:
        """Where units of the request lie in the pool, counted in units."""
        try:
            ids = numbered(part.blocks.groups[self.group], self.num_blocks)
        except ValueError as flaw:
            raise LocalProtocolError(f"groups[{self.group}]: {flaw}") from flaw
        block, within = np.divmod(positions, self.grid.ratio)
        blocks: Ints = ids[block - part.first[self.group]]
        return blocks * self.grid.ratio + within

    def pieces(self, rows: Ints, units: Ints, counts: Ints) -> Descriptors:
        """The pieces of some layers and runs of `counts` units, ordered by layer, run, and start in the unit."""
        cell = self.cell[rows, None]
        block, within = np.divmod(units, self.grid.ratio)
        starts = self.offset[rows, None] + block * self.stride[rows, None] + within * self.grid.step * cell
        offset = (starts[:, :, None] + self.grid.inner * cell[:, :, None]).reshape(-1)
        length = np.repeat(cell * self.grid.length * counts, len(self.grid.inner))
        return Descriptors(np.repeat(self.region[rows], len(units) * len(self.grid.inner)), offset, length)


@frozen(eq=False)
class _Share:
    """What a leg moves of one group. `unit` in tokens; `number` is that of the first layer in the leg."""

    unit: int
    number: int
    layers: tuple[str, ...]
    sides: dict[Role, _Side]

    def rows(self, parts: Iterable[Part]) -> Ints:
        """The layers that all parts have."""
        named = [frozenset(part.layers) for part in parts if part.layers is not None]
        rows = [row for row, name in enumerate(self.layers) if all(name in names for names in named)]
        return np.array(rows, np.int64)

    def positions(self, parts: Mapping[Role, Part]) -> Ints:
        """The units of the request that all parts have, in order."""
        spans = [self.sides[role].span(part) for role, part in parts.items()]
        return np.arange(max(low for low, _ in spans), min(high for _, high in spans))

    def pieces(self, parts: Mapping[Role, Part]) -> list[Descriptors]:
        """The pieces that all parts have, on the side of each; within a layer in the order of the first side."""
        rows, positions = self.rows(parts.values()), self.positions(parts)
        units = [self.sides[role].lookup(part, positions) for role, part in parts.items()]
        if (np.diff(units[0]) < 0).any():
            first = self.sides[next(iter(parts))]
            ascending = order(units[0], first.num_blocks * first.grid.ratio)
            units = [column[ascending] for column in units]
        counts = np.ones_like(units[0])
        if len(counts) and all(self.sides[role].dense for role in parts):
            breaks = np.logical_or.reduce([np.diff(column) != 1 for column in units])
            starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
            counts = np.diff(starts, append=len(counts))
            units = [column[starts] for column in units]
        return [self.sides[role].pieces(rows, column, counts) for role, column in zip(parts, units, strict=True)]


@frozen(eq=False)
class LegPlan:
    """What moves between one producer rank and one consumer rank.

    `digest` (32 hex digits) covers heads, layers, groups and the cut of the blocks, never block
    ids or counts: it is equal at both ends exactly if both mean the same leg. `empty`: the two
    ranks share no data.
    """

    digest: str
    empty: bool
    _groups: int
    _shares: tuple[_Share, ...] = field(repr=False)

    def move(self, producer: Part, consumer: Part) -> tuple[Descriptors, Descriptors]:
        """The bytes that both parts have, as (producer's, consumer's) ranges of equal lengths.

        Runs that are contiguous on both sides are one range. Raises LocalProtocolError for a
        part that does not fit its layout.
        """
        ours, theirs = self._runs({Role.PRODUCER: producer, Role.CONSUMER: consumer})
        return ours, theirs

    def ranges(self, role: Role, part: Part) -> Descriptors:
        """This leg's bytes in the blocks of one side; every range of `move` lies inside one of them.

        Raises LocalProtocolError for a part that does not fit its layout.
        """
        return self._runs({role: part})[0]

    def units(
        self, role: Role, part: Part, tokens: int | None = None, other: Part | None = None
    ) -> tuple[Descriptors, Ints]:
        """This leg's pieces in the blocks of one side, none coalesced, and a key for each.

        A key names the same bytes of the request at both ends and comes once in a leg. With
        unequal block sizes the blocks of one side may reach beyond those of the other: `tokens`
        leaves out what lies behind the prompt, `other` what that part of the other side lacks.
        Raises LocalProtocolError for a part that does not fit its layout.
        """
        parts = {role: part}
        if other is not None:
            parts[Role.CONSUMER if role is Role.PRODUCER else Role.PRODUCER] = other
        self._check_shape(parts.values())
        pieces, keys = [_NOTHING], [_NOTHING.offset]
        layers = sum(len(share.layers) for share in self._shares)
        for share in self._shares:
            side, rows, positions = share.sides[role], share.rows(parts.values()), share.positions(parts)
            if tokens is not None:
                positions = positions[positions * share.unit < tokens]
            pieces.append(side.pieces(rows, side.lookup(part, positions), np.ones_like(positions)))
            count = len(side.grid.inner)
            place = (positions[:, None] * count + np.arange(count)).reshape(-1)
            keys.append((place * layers + (share.number + rows)[:, None]).reshape(-1))
        return _joined(pieces), np.concatenate(keys)

    def _runs(self, parts: Mapping[Role, Part]) -> list[Descriptors]:
        self._check_shape(parts.values())
        batches = [[_NOTHING for _ in parts], *(share.pieces(parts) for share in self._shares)]
        return _coalesced([_joined(side) for side in zip(*batches, strict=True)])

    def _check_shape(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if not len(part.first) == len(part.blocks.groups) == self._groups:
                raise LocalProtocolError(f"a part has {len(part.blocks.groups)} block lists for {self._groups} groups")
            if any(not 0 <= first <= MAX_POSITION for first in part.first):
                raise LocalProtocolError(f"first positions {part.first} of a part are out of bounds")


_NOTHING = Descriptors.of(())


def _joined(pieces: Iterable[Descriptors]) -> Descriptors:
    table = [(piece.region, piece.offset, piece.length) for piece in pieces]
    return Descriptors(*map(np.concatenate, zip(*table, strict=True)))


def _coalesced(sides: Sequence[Descriptors]) -> list[Descriptors]:
    """Merge pieces that follow one another on all sides.

    In the order of the first side's addresses two such pieces are always neighbours, whichever
    side comes first: the number of runs is the least there is, and the same in both directions.
    """
    lead = sides[0]
    if not len(lead):
        return list(sides)
    step, jump = np.diff(lead.region), np.diff(lead.offset)
    if not ((step > 0) | ((step == 0) & (jump >= 0))).all():
        order = np.lexsort((lead.offset, lead.region))
        sides = [Descriptors(side.region[order], side.offset[order], side.length[order]) for side in sides]
    joins = [(np.diff(side.region) == 0) & (np.diff(side.offset) == side.length[:-1]) for side in sides]
    starts = np.concatenate(([0], np.flatnonzero(~np.logical_and.reduce(joins)) + 1))
    if len(starts) == len(lead):
        return list(sides)
    length = np.add.reduceat(sides[0].length, starts)
    return [Descriptors(side.region[starts], side.offset[starts], length) for side in sides]


def plan_leg(producer: Layout, consumer: Layout) -> LegPlan:
    """Plan the leg between these two ranks. Raises LayoutMismatch."""
    check(producer, consumer)
    shares: list[_Share] = []
    text: list[object] = [producer.rank, consumer.rank]
    number = 0
    for ours, theirs in zip(producer.groups, consumer.groups, strict=True):
        sources = _sources(ours, producer.tp_size, consumer.tp_size)
        here = (sources.producer == producer.tp_rank) & (sources.consumer == consumer.tp_rank)
        twins = {layer.name: layer for layer in theirs.layers}
        layers = sorted((layer for layer in ours.layers if layer.name in twins), key=lambda x: (x.region, x.offset))
        if not here.any() or not layers:
            continue
        heads = sources.head[here]
        first, count = (0, ours.heads) if ours.replicated else (int(heads[0]), len(heads))
        grids = [
            _grid(group, other, first - _first_head(group, layout), count)
            for group, other, layout in ((ours, theirs, producer), (theirs, ours, consumer))
        ]
        names = tuple(layer.name for layer in layers)
        share = _Share(
            unit=min(ours.block_size, theirs.block_size),
            number=number,
            layers=names,
            sides={
                Role.PRODUCER: _Side.of(producer, ours.index, grids[0], layers),
                Role.CONSUMER: _Side.of(consumer, theirs.index, grids[1], [twins[name] for name in names]),
            },
        )
        shares.append(share)
        number += len(layers)
        text += [ours.index, share.unit, first, count, names, share.sides[Role.PRODUCER].cell.tolist()]
        text += [(grid.ratio, grid.cells, grid.step, grid.inner.tolist(), grid.length) for grid in grids]
    digest = hashlib.blake2b(repr(text).encode(), digest_size=16).hexdigest()
    return LegPlan(digest, not shares, len(producer.groups), tuple(shares))


def _first_head(group: CacheGroup, layout: Layout) -> int:
    return 0 if group.replicated else layout.tp_rank * group.total_heads // layout.tp_size
