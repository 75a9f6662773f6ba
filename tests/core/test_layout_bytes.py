"""The planner against a reference that looks at every byte of small random worlds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvx.core.layout import LegPlan, Pair, pairs, plan_leg
from kvx.core.model import BlockTable, CacheGroup, Descriptors, LayerSpec, Layout, Packing, Part, Role

POISON = 0xEE

# ------------------------------------------------------------------ a world, bytes and all


@frozen
class Cache:
    """One cache group of the model: what both instances agree on."""

    names: tuple[str, ...]
    total_heads: int
    packing: Packing
    replicated: bool
    cell: int
    """Bytes per token and head."""


@frozen
class Shape:
    """How one instance holds it."""

    tp: int
    stages: tuple[tuple[str, ...], ...]
    block_sizes: tuple[int, ...]
    num_blocks: int = 12
    arrangement: str = "regions"

    def layout(self, caches: tuple[Cache, ...], rank: int) -> Layout:
        stage, position = divmod(rank, self.tp)
        here = set(self.stages[stage])
        region, groups = 0, []
        for index, (cache, block_size) in enumerate(zip(caches, self.block_sizes, strict=True)):
            heads = cache.total_heads if cache.replicated else max(1, cache.total_heads // self.tp)
            size = block_size * heads * cache.cell
            names = [name for name in cache.names if name in here]
            layers = []
            for nth, name in enumerate(names if self.arrangement != "backwards" else names[::-1]):
                match self.arrangement:
                    case "regions" | "backwards":
                        spec = LayerSpec(name, region + nth, 0, size, size)
                    case "gaps":
                        spec = LayerSpec(name, region + nth, 5, size, size + 3)
                    case "one region":
                        spec = LayerSpec(name, region, 7 + nth * size * self.num_blocks, size, size)
                    case "interleaved":
                        spec = LayerSpec(name, region, nth * size, size, size * len(names))
                    case other:
                        raise AssertionError(other)
                layers.append(spec)
            groups.append(
                CacheGroup(
                    index, "full", block_size, tuple(layers), heads, cache.total_heads, cache.packing, cache.replicated
                )
            )
            region += len(names) + 1
        return Layout(
            "model",
            "int8",
            "test",
            tuple(groups),
            self.num_blocks,
            tp_rank=position,
            tp_size=self.tp,
            pp_rank=stage,
            pp_size=len(self.stages),
            stages=self.stages if len(self.stages) > 1 else (),
        )

    def layouts(self, caches: tuple[Cache, ...]) -> list[Layout]:
        return [self.layout(caches, rank) for rank in range(self.tp * len(self.stages))]


def memory(layout: Layout) -> dict[int, bytearray]:
    sizes: Counter[int] = Counter()
    for group in layout.groups:
        for layer in group.layers:
            end = layer.offset + layer.stride * layout.num_blocks + 9
            sizes[layer.region] = max(sizes[layer.region], end)
    return {region: bytearray([POISON]) * size for region, size in sizes.items()}


def heads_of(layout: Layout, group: CacheGroup) -> range:
    """By definition, one head after the other."""
    if group.replicated:
        return range(group.total_heads)
    if group.total_heads < layout.tp_size:
        head = layout.tp_rank * group.total_heads // layout.tp_size
        return range(head, head + 1)
    return range(layout.tp_rank * group.heads, (layout.tp_rank + 1) * group.heads)


def cells(layout: Layout, part: Part) -> Iterator[tuple[tuple[str, int, int, int], int, int]]:
    """(layer, token, head, byte) -> (region, offset), for each byte of a part, from the definition of the packings."""
    for group, first, ids in zip(layout.groups, part.first, part.blocks.groups, strict=True):
        held = heads_of(layout, group)
        for layer in group.layers:
            if part.layers is not None and layer.name not in part.layers:
                continue
            width = layer.block_bytes // (group.block_size * group.heads)
            for (position, block), token, nth, byte in product(
                enumerate(ids, first), range(group.block_size), range(group.heads), range(width)
            ):
                if group.packing is Packing.TOKENS_HEADS:
                    place = (token * group.heads + nth) * width + byte
                else:
                    # In HEADS and WHOLE the order inside is nobody's business, as long as both sides mean the same.
                    place = (nth * group.block_size + token) * width + byte
                name = (layer.name, position * group.block_size + token, held[nth], byte)
                yield name, layer.region, layer.offset + block * layer.stride + place


def value(name: tuple[str, int, int, int]) -> int:
    return hashlib.blake2b(repr(name).encode(), digest_size=1).digest()[0] % POISON


def copy(
    source: dict[int, bytearray], target: dict[int, bytearray], here: Descriptors, there: Descriptors
) -> Counter[tuple[int, int]]:
    """Do what a transport does; returns how often each byte was written."""
    written: Counter[tuple[int, int]] = Counter()
    for (region, offset, length), (into, at, size) in zip(here.pieces(), there.pieces(), strict=True):
        assert length == size > 0
        assert 0 <= offset <= offset + length <= len(source[region])
        assert 0 <= at <= at + size <= len(target[into])
        target[into][at : at + size] = source[region][offset : offset + length]
        written.update((into, at + byte) for byte in range(size))
    return written


@frozen
class World:
    caches: tuple[Cache, ...]
    producers: list[Layout]
    consumers: list[Layout]
    tokens: int
    sent: list[Part]
    wanted: list[Part]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    producer_tp, consumer_tp = draw(st.sampled_from([1, 2, 4, 3])), draw(st.sampled_from([4, 2, 1, 3]))
    caches, sizes = [], []
    for index in range(draw(st.integers(1, 2))):
        packing = draw(st.sampled_from(Packing))
        replicated = draw(st.sampled_from([False, False, False, True]))
        heads = draw(st.sampled_from([12, 12, 2, 1]))
        fits = [tp for tp in (producer_tp, consumer_tp) if heads > tp and heads % tp]
        per_rank = {max(1, heads // tp) for tp in (producer_tp, consumer_tp)}
        if fits or (packing is Packing.WHOLE and len(per_rank) > 1):
            replicated = True
        small = draw(st.sampled_from([1, 2, 3]))
        cuttable = packing in (Packing.TOKENS_HEADS, Packing.HEADS_TOKENS)
        ratio = draw(st.sampled_from([2, 1, 4])) if cuttable else 1
        ours, theirs = draw(st.permutations([small, small * ratio]))
        own = tuple(f"{index}.{layer}" for layer in range(draw(st.integers(1, 3))))
        caches.append(Cache(own, heads, packing, replicated, draw(st.integers(1, 3))))
        sizes.append((ours, theirs))
    names = [name for cache in caches for name in cache.names]

    def stages() -> tuple[tuple[str, ...], ...]:
        cut = draw(st.lists(st.integers(0, len(names)), max_size=2).map(sorted))
        return tuple(tuple(names[a:b]) for a, b in pairwise([0, *cut, len(names)]))

    arrangements = st.sampled_from(["regions", "backwards", "gaps", "one region", "interleaved"])
    producer, consumer = (
        Shape(tp, stages(), tuple(size[side] for size in sizes), 12, draw(arrangements))
        for side, tp in enumerate((producer_tp, consumer_tp))
    )
    most = min(16, *(12 * min(size) for size in sizes))
    tokens = max(1, most - draw(st.integers(0, 30)))

    def part(layout: Layout) -> Part:
        first, tables = [], []
        for group in layout.groups:
            end = -(-tokens // group.block_size)
            start = min(end, draw(st.sampled_from([0, 0, 1, 2, 12])))
            count = end - start
            base = draw(st.integers(0, layout.num_blocks - count))
            ids = range(base, base + count)
            tables.append(ids if draw(st.booleans()) else draw(st.permutations(range(layout.num_blocks)))[:count])
            first.append(start)
        return Part(None, tuple(first), BlockTable.of(*tables))

    producers, consumers = producer.layouts(tuple(caches)), consumer.layouts(tuple(caches))
    # One scheduler decides for all ranks of an instance: same positions, same ids.
    sent, wanted = part(producers[0]), part(consumers[0])
    return World(tuple(caches), producers, consumers, tokens, [sent] * len(producers), [wanted] * len(consumers))


def legs(world: World) -> Iterator[tuple[Pair, LegPlan, int, int]]:
    for pair in pairs(world.producers[0], world.consumers[0]):
        leg = plan_leg(world.producers[pair.producer], world.consumers[pair.consumer])
        yield pair, leg, pair.producer, pair.consumer


def common_tokens(world: World, group: int) -> range:
    spans = [
        (part.first[group] * size, (part.first[group] + len(part.blocks.groups[group])) * size)
        for part, size in (
            (world.sent[0], world.producers[0].groups[group].block_size),
            (world.wanted[0], world.consumers[0].groups[group].block_size),
        )
    ]
    return range(max(low for low, _ in spans), min(high for _, high in spans))


quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(quick, max_examples=120)
@given(worlds())
def test_each_consumer_byte_is_written_once_and_nothing_else(world: World) -> None:
    sources = [memory(layout) for layout in world.producers]
    for layout, part, source in zip(world.producers, world.sent, sources, strict=True):
        for name, region, offset in cells(layout, part):
            source[region][offset] = value(name)
    targets = [memory(layout) for layout in world.consumers]
    written: list[Counter[tuple[int, int]]] = [Counter() for _ in targets]
    for pair, leg, producer, consumer in legs(world):
        here, there = leg.move(world.sent[producer], world.wanted[consumer])
        assert not (pair.empty and len(here))
        written[consumer] += copy(sources[producer], targets[consumer], here, there)

    group_of = {name: index for index, cache in enumerate(world.caches) for name in cache.names}
    for layout, part, target, times in zip(world.consumers, world.wanted, targets, written, strict=True):
        expected = memory(layout)
        count = 0
        for name, region, offset in cells(layout, part):
            if name[1] in common_tokens(world, group_of[name[0]]):
                expected[region][offset] = value(name)
                count += 1
        assert target == expected
        assert len(times) == count
        assert set(times.values()) <= {1}


@quick
@given(worlds())
def test_both_ends_name_the_same_pieces(world: World) -> None:
    for _, leg, producer, consumer in legs(world):
        ours, theirs = world.sent[producer], world.wanted[consumer]
        here, keys = leg.units(Role.PRODUCER, ours, other=theirs)
        there, twins = leg.units(Role.CONSUMER, theirs, other=ours)
        places = dict(zip(keys.tolist(), here.pieces(), strict=True))
        others = dict(zip(twins.tolist(), there.pieces(), strict=True))
        assert len(places) == len(keys)
        assert places.keys() == others.keys()
        pieces = [(*places[key], *others[key]) for key in places]
        assert all(piece[2] == piece[5] for piece in pieces)

        runs = leg.move(ours, theirs)
        assert runs[0].nbytes == runs[1].nbytes == here.nbytes
        by_piece = {
            (region, offset + byte, into, at + byte)
            for region, offset, length, into, at, _ in pieces
            for byte in range(length)
        }
        by_run = {
            (region, offset + byte, into, at + byte)
            for (region, offset, length), (into, at, _) in zip(runs[0].pieces(), runs[1].pieces(), strict=True)
            for byte in range(length)
        }
        assert by_run == by_piece
        # The least possible number of runs: each begins at a byte whose predecessor moves elsewhere or not at all.
        starts = [(a, b, c, d) for a, b, c, d in by_piece if (a, b - 1, c, d - 1) not in by_piece]
        assert len(runs[0]) == len(starts)


@quick
@given(worlds())
def test_pieces_up_to_the_prompts_end_agree_without_the_other_sides_blocks(world: World) -> None:
    def whole(layout: Layout, part: Part) -> Part:
        ids = [range(-(-world.tokens // group.block_size)) for group in layout.groups]
        return Part(None, (0,) * len(part.first), BlockTable.of(*ids))

    for _, leg, producer, consumer in legs(world):
        ours = whole(world.producers[producer], world.sent[producer])
        theirs = whole(world.consumers[consumer], world.wanted[consumer])
        here, keys = leg.units(Role.PRODUCER, ours, world.tokens)
        there, twins = leg.units(Role.CONSUMER, theirs, world.tokens)
        assert sorted(keys.tolist()) == sorted(twins.tolist())
        assert here.nbytes == there.nbytes == leg.move(ours, theirs)[0].nbytes


@quick
@given(worlds())
def test_ranges_are_the_share_of_one_side_and_hold_every_move(world: World) -> None:
    for _, leg, producer, consumer in legs(world):
        moved = leg.move(world.sent[producer], world.wanted[consumer])
        for role, part, side in (
            (Role.PRODUCER, world.sent[producer], moved[0]),
            (Role.CONSUMER, world.wanted[consumer], moved[1]),
        ):
            ranges = leg.ranges(role, part)
            for region, offset, length in side.pieces():
                holders = [
                    1
                    for into, at, size in ranges.pieces()
                    if into == region and at <= offset <= offset + length <= at + size
                ]
                assert len(holders) == 1
            assert ranges.nbytes == leg.units(role, part)[0].nbytes


@quick
@given(worlds())
def test_pairs_are_the_same_from_any_rank_and_nobody_is_left_out(world: World) -> None:
    found = pairs(world.producers[0], world.consumers[0])
    for producer, consumer in product(world.producers, world.consumers):
        assert pairs(producer, consumer) == found
    assert len({(pair.producer, pair.consumer) for pair in found}) == len(found)
    assert {pair.producer for pair in found} == set(range(len(world.producers)))
    assert {pair.consumer for pair in found} == set(range(len(world.consumers)))
    busy = Counter(pair.producer for pair in found if not pair.empty)
    idle = Counter(pair.producer for pair in found if pair.empty)
    served = {pair.consumer for pair in found if not pair.empty}
    for pair in found:
        assert not pair.empty or pair.producer not in busy or pair.consumer not in served
    if len(served) == len(world.consumers):
        assert idle == Counter(set(range(len(world.producers))) - set(busy))
    exact = 1 in (world.producers[0].pp_size, world.consumers[0].pp_size)
    full = {(pair.producer, pair.consumer) for pair in found if not pair.empty}
    for (ours, producer), (theirs, consumer) in product(enumerate(world.producers), enumerate(world.consumers)):
        empty = plan_leg(producer, consumer).empty
        assert ((ours, theirs) in full) == (not empty) if exact else empty or (ours, theirs) in full


@quick
@given(worlds())
def test_a_digest_knows_the_leg_and_not_the_blocks(world: World) -> None:
    digests = Counter(leg.digest for _, leg, _, _ in legs(world))
    assert set(digests.values()) == {1}
    for _, leg, producer, consumer in legs(world):
        ours = evolve(world.producers[producer], num_blocks=99, dp_rank=3, dp_size=8)
        assert plan_leg(ours, world.consumers[consumer]).digest == leg.digest


@quick
@given(worlds(), st.data())
def test_layer_by_layer_and_block_by_block_is_the_same_as_at_once(world: World, data: st.DataObject) -> None:
    for _, leg, producer, consumer in legs(world):
        ours, theirs = world.sent[producer], world.wanted[consumer]
        names = [layer.name for group in world.producers[producer].groups for layer in group.layers]
        cut = [data.draw(st.integers(0, len(ids))) for ids in ours.blocks.groups]
        chunks = [
            Part(None, ours.first, BlockTable.of(*(ids[:n] for ids, n in zip(ours.blocks.groups, cut, strict=True)))),
            Part(
                None,
                tuple(first + n for first, n in zip(ours.first, cut, strict=True)),
                BlockTable.of(*(ids[n:] for ids, n in zip(ours.blocks.groups, cut, strict=True))),
            ),
        ]
        at_once, in_parts = (
            Counter(
                (region, offset + byte, into, at + byte)
                for part in parts
                for here, there in [leg.move(part, theirs)]
                for (region, offset, length), (into, at, _) in zip(here.pieces(), there.pieces(), strict=True)
                for byte in range(length)
            )
            for parts in ([ours], [evolve(chunk, layers=(name,)) for chunk in chunks for name in names])
        )
        assert at_once == in_parts
