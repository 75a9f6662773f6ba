"""The planner against a reference that looks at every byte, and the hazards of the field by hand."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvx.core.errors import LayoutMismatch, LocalProtocolError
from kvx.core.layout import LegPlan, Pair, check, pairs, plan_leg
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
    producer_tp, consumer_tp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    caches, sizes, shared_pool = [], [], 12
    for index in range(draw(st.integers(1, 2))):
        packing = draw(st.sampled_from(Packing))
        replicated = draw(st.booleans())
        heads = draw(st.sampled_from([1, 2, 12]))
        fits = [tp for tp in (producer_tp, consumer_tp) if heads > tp and heads % tp]
        per_rank = {max(1, heads // tp) for tp in (producer_tp, consumer_tp)}
        if fits or (packing is Packing.WHOLE and len(per_rank) > 1):
            replicated = True
        small = draw(st.sampled_from([1, 2, 3]))
        cuttable = packing in (Packing.TOKENS_HEADS, Packing.HEADS_TOKENS)
        ratio = draw(st.sampled_from([1, 1, 2, 4])) if cuttable else 1
        ours, theirs = draw(st.permutations([small, small * ratio]))
        names = tuple(f"{index}.{layer}" for layer in range(draw(st.integers(1, 3))))
        caches.append(Cache(names, heads, packing, replicated, draw(st.integers(1, 3))))
        sizes.append((ours, theirs))
    names = [name for cache in caches for name in cache.names]

    def stages() -> tuple[tuple[str, ...], ...]:
        cut = draw(st.lists(st.integers(0, len(names)), max_size=2).map(sorted))
        return tuple(tuple(names[a:b]) for a, b in pairwise([0, *cut, len(names)]))

    arrangements = st.sampled_from(["regions", "backwards", "gaps", "one region", "interleaved"])
    producer, consumer = (
        Shape(tp, stages(), tuple(size[side] for size in sizes), shared_pool, draw(arrangements))
        for side, tp in enumerate((producer_tp, consumer_tp))
    )
    tokens = draw(st.integers(1, min(12, *(12 * min(size) for size in sizes))))

    def part(layout: Layout) -> Part:
        first, tables = [], []
        for group in layout.groups:
            end = -(-tokens // group.block_size)
            start = draw(st.integers(0, end))
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


quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
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
    full = {(pair.producer, pair.consumer) for pair in found if not pair.empty}
    for (ours, producer), (theirs, consumer) in product(enumerate(world.producers), enumerate(world.consumers)):
        if not plan_leg(producer, consumer).empty:
            assert (ours, theirs) in full


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


# ------------------------------------------------------------------------ by hand


def shape(tp: int = 1, block_size: int = 4, num_blocks: int = 256, *stages: tuple[str, ...]) -> Shape:
    return Shape(tp, stages or (("a", "b"),), (block_size,), num_blocks)


def cache(heads: int = 4, packing: Packing = Packing.TOKENS_HEADS, *, replicated: bool = False) -> tuple[Cache, ...]:
    return (Cache(("a", "b"), heads, packing, replicated, 2),)


def single(caches: tuple[Cache, ...] = cache(), **facts: int) -> Layout:
    return evolve(shape(**facts), stages=(caches[0].names,)).layout(caches, 0)


def blocks(ids: list[int] | range, first: int = 0, layers: tuple[str, ...] | None = None) -> Part:
    return Part(layers, (first,), BlockTable.of(ids))


def numbers(producer: Layout, consumer: Layout) -> list[tuple[int, int, bool]]:
    return [(pair.producer, pair.consumer, pair.empty) for pair in pairs(producer, consumer)]


def test_descriptors_of_contiguous_and_alternating_blocks() -> None:
    """M3: 64 blocks in 4 regions."""
    four = (Cache(("a", "b", "c", "d"), 4, Packing.TOKENS_HEADS, False, 2),)
    leg = plan_leg(single(four), single(four))
    alternating = blocks(range(0, 128, 2))
    assert len(leg.move(blocks(range(64)), blocks(range(9, 73)))[0]) == 4
    assert len(leg.move(alternating, blocks(range(64)))[0]) == 256
    assert len(leg.move(blocks(range(64)), alternating)[0]) == 256
    # Fragmented on both sides in the same way is still fragmented, in pairs it is half.
    assert len(leg.move(alternating, alternating)[0]) == 256
    twos = [block for start in range(0, 128, 4) for block in (start, start + 1)]
    assert len(leg.move(blocks(twos), blocks(range(64)))[0]) == 128
    # Blocks that are contiguous, only not in the order of the request.
    backwards = blocks(range(63, -1, -1))
    assert len(leg.move(backwards, backwards)[0]) == 4
    assert len(leg.move(backwards, blocks(range(64)))[0]) == 256


def test_both_directions_need_equally_many_descriptors() -> None:
    """M6: the second turn moves the same blocks back."""
    rng = np.random.default_rng(7)
    ours, theirs = (blocks(rng.permutation(64)[:40].tolist()) for _ in range(2))
    for packing, ratio in product((Packing.TOKENS_HEADS, Packing.HEADS_TOKENS), (1, 4)):
        here = Shape(1, (("a", "b"),), (4,), 64, "interleaved").layout(cache(4, packing), 0)
        there = Shape(2, (("a", "b"),), (4 * ratio,), 64, "one region").layout(cache(4, packing), 1)
        forth = plan_leg(here, there).move(ours, theirs)
        back = plan_leg(there, here).move(theirs, ours)
        assert len(forth[0]) == len(back[0]) > 2
        assert sorted(forth[0].pieces()) == sorted(back[1].pieces())


def test_layers_between_each_other_in_one_region_are_one_run() -> None:
    layout = Shape(1, (("a", "b"),), (4,), 64, "interleaved").layout(cache(), 0)
    here, there = plan_leg(layout, layout).move(blocks(range(3, 23)), blocks(range(3, 23)))
    assert here.pieces() == there.pieces() == [(0, 3 * 64, 20 * 64)]


def test_planning_does_not_grow_with_the_pool() -> None:
    """M4: a leg holds numbers per layer, none per block."""
    small, large = plan_leg(single(), single()), plan_leg(single(num_blocks=100_000), single(num_blocks=100_000))
    sides = [leg._shares[0].sides[Role.PRODUCER] for leg in (small, large)]
    assert [len(side.offset) for side in sides] == [2, 2]
    assert [len(side.grid.inner) for side in sides] == [1, 1]


def test_64_token_blocks_to_16_token_blocks() -> None:
    """F1: 100 tokens, 2 blocks of 64 against 7 blocks of 16."""
    large, small = single(block_size=64), single(block_size=16)
    size = 16 * 4 * 2
    here, there = plan_leg(large, small).move(blocks([5, 9]), blocks([20, 3, 21, 22, 7, 8, 30], 0))
    expected = [(5, 0, 20), (5, 1, 3), (5, 2, 21), (5, 3, 22), (9, 0, 7), (9, 1, 8), (9, 2, 30)]
    moved = [
        (region, at, into, to, size)
        for (region, offset, length), (into, start, _) in zip(here.pieces(), there.pieces(), strict=True)
        for at, to in zip(range(offset, offset + length, size), range(start, start + length, size), strict=True)
    ]
    assert moved == [
        (region, (block * 4 + quarter) * size, region, other * size, size)
        for region in (0, 1)
        for block, quarter, other in expected
    ]
    back = plan_leg(small, large).move(blocks([20, 3, 21, 22, 7, 8, 30]), blocks([5, 9]))
    assert sorted(back[1].pieces()) == sorted(here.pieces())


def test_four_ranks_share_two_heads() -> None:
    """F6: ranks 0 and 1 need head 0, ranks 2 and 3 head 1."""
    one, four = shape(), shape(tp=4)
    legs = [plan_leg(one.layout(cache(2), 0), four.layout(cache(2), rank)) for rank in range(4)]
    offsets = [leg.move(blocks([3]), blocks([3]))[0].offset.tolist() for leg in legs]
    block, token, head = 3 * 16, 4, 2
    heads = [[block + at * token + nth * head for at in range(4)] * 2 for nth in range(2)]
    assert offsets == [heads[0], heads[0], heads[1], heads[1]]
    assert numbers(one.layout(cache(2), 0), four.layout(cache(2), 2)) == [(0, rank, False) for rank in range(4)]


def test_each_head_is_read_once_and_every_rank_released() -> None:
    """F7: four ranks hold two heads; G1: four ranks hold the same bytes."""
    one, two, four = (shape(tp=tp) for tp in (1, 2, 4))
    for heads, consumer, expected in (
        (cache(2), one, [(0, 0, False), (1, 0, True), (2, 0, False), (3, 0, True)]),
        (cache(1, replicated=True), one, [(0, 0, False), (1, 0, True), (2, 0, True), (3, 0, True)]),
        (cache(1, replicated=True), two, [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)]),
        (cache(4, replicated=True), four, [(rank, rank, False) for rank in range(4)]),
        (cache(2), four, [(rank, rank, False) for rank in range(4)]),
        (cache(4), two, [(0, 0, False), (1, 0, False), (2, 1, False), (3, 1, False)]),
    ):
        assert numbers(four.layout(heads, 1), consumer.layout(heads, 0)) == expected


def test_pipeline_stages_meet_by_name() -> None:
    """N4: the consumer holds the layers in another order, a stage sends its own only."""
    names = tuple("abcdefgh")
    model = (Cache(names, 2, Packing.TOKENS_HEADS, False, 2),)
    staged = Shape(1, (names[:4], names[4:]), (4,))
    whole = Shape(1, (names,), (4,), arrangement="backwards")
    assert numbers(staged.layout(model, 1), whole.layout(model, 0)) == [(0, 0, False), (1, 0, False)]
    here, there = plan_leg(staged.layout(model, 1), whole.layout(model, 0)).move(blocks([1]), blocks([2]))
    by_region = sorted(zip(here.region.tolist(), there.region.tolist(), strict=True))
    assert by_region == [(0, 3), (1, 2), (2, 1), (3, 0)]
    both = plan_leg(staged.layout(model, 0), staged.layout(model, 1))
    assert both.empty
    assert len(both.move(blocks([1]), blocks([2]))[0]) == 0
    assert numbers(staged.layout(model, 0), staged.layout(model, 0)) == [(0, 0, False), (1, 1, False)]


def test_a_stage_without_layers_still_has_a_pair() -> None:
    split, empty = shape(1, 4, 9, ("a",), ("b",)), shape(1, 4, 9, ("a", "b"), ())
    assert numbers(split.layout(cache(), 0), empty.layout(cache(), 0)) == [(0, 0, False), (1, 0, False), (1, 1, True)]
    assert numbers(empty.layout(cache(), 0), split.layout(cache(), 0)) == [(0, 0, False), (0, 1, False), (1, 1, True)]


def test_the_tail_of_the_prompt_moves() -> None:
    """H2: the consumer has the first four of six blocks. H3: it has one block more than the producer."""
    leg = plan_leg(single(), single())
    here, there = leg.move(blocks([10, 11, 12, 13, 14, 15], layers=("a",)), blocks([3, 2], 4))
    assert sorted(zip(here.offset.tolist(), there.offset.tolist(), strict=True)) == [
        (14 * 32, 3 * 32),
        (15 * 32, 2 * 32),
    ]
    here, there = leg.move(blocks([0, 1, 2, 3, 4], layers=("a",)), blocks([7, 9], 4))
    assert (here.pieces(), there.pieces()) == ([(0, 4 * 32, 32)], [(0, 7 * 32, 32)])


def test_layers_of_unequal_size() -> None:
    """F10: each layer has a block size of its own in bytes."""
    group = CacheGroup(0, "full", 4, (LayerSpec("a", 0, 0, 64, 64), LayerSpec("b", 1, 8, 16, 24)), 4, 4)
    layout = Layout("m", "d", "v", (group,), 10)
    here, _ = plan_leg(layout, layout).move(blocks([2, 3]), blocks([2, 3]))
    assert here.pieces() == [(0, 128, 128), (1, 56, 16), (1, 80, 16)]


def test_heads_are_cut_in_as_few_pieces_as_the_packing_allows() -> None:
    """F13: 64 tokens, 2 layers, 4 heads, 1 rank to 2."""
    counts = {
        packing: len(
            plan_leg(shape(block_size=16).layout(cache(4, packing), 0), shape(2, 16).layout(cache(4, packing), 1)).move(
                blocks(range(4)), blocks(range(4))
            )[0]
        )
        for packing in (Packing.TOKENS_HEADS, Packing.HEADS_TOKENS, Packing.HEADS)
    }
    assert counts == {Packing.TOKENS_HEADS: 128, Packing.HEADS_TOKENS: 8, Packing.HEADS: 8}


def test_a_part_that_does_not_fit_is_refused() -> None:
    """F11: ids beyond the usable blocks never become addresses."""
    leg = plan_leg(single(num_blocks=100), single(num_blocks=10))
    good = blocks([1, 2])
    for bad, cause in (
        (blocks([1, 100]), "100"),
        (blocks([-1]), "-1"),
        (blocks([2**70]), str(2**70)),
        (blocks([1, 1]), "twice"),
        (blocks([1], -1), "first positions"),
        (blocks([1], 2**41), "first positions"),
        (Part(None, (0, 0), BlockTable.of([1], [2])), "2 block lists for 1 groups"),
        (Part(None, (0,), BlockTable.of()), "0 block lists for 1 groups"),
    ):
        for call in (
            lambda bad=bad: leg.move(bad, good),
            lambda bad=bad: leg.ranges(Role.PRODUCER, bad),
            lambda bad=bad: leg.units(Role.PRODUCER, bad),
        ):
            with pytest.raises(LocalProtocolError, match=cause):
                call()
    with pytest.raises(LocalProtocolError, match="not all below 10"):
        leg.move(good, blocks([1, 10]))


def test_the_ends_of_the_address_space() -> None:
    layer = LayerSpec("a", 2**40, 2**40, 2**21, 2**21)
    layout = Layout("m", "d", "v", (CacheGroup(0, "full", 4, (layer,), 4, 4),), 2**40)
    leg = plan_leg(layout, layout)
    last = blocks([2**40 - 1], 2**40)
    here, _ = leg.move(last, last)
    assert here.pieces() == [(2**40, 2**40 + (2**40 - 1) * 2**21, 2**21)]
    with pytest.raises(LayoutMismatch, match="soundness"):
        check(evolve(layout, num_blocks=2**42), layout)


# ------------------------------------------------------------------------ refusals


def refused(producer: Layout, consumer: Layout) -> str:
    with pytest.raises(LayoutMismatch) as error:
        check(producer, consumer)
    for call in (pairs, plan_leg):
        with pytest.raises(LayoutMismatch, match=re.escape(str(error.value))):
            call(producer, consumer)
    return error.value.fact


@pytest.mark.parametrize("fact", ["model", "dtype", "variant"])
def test_a_fact_that_differs_is_named(fact: str) -> None:
    layout = single()
    assert refused(layout, evolve(layout, **{fact: "other"})) == fact


def regroup(layout: Layout, **facts: object) -> Layout:
    return evolve(layout, groups=tuple(evolve(group, **facts) for group in layout.groups))


def test_what_cannot_be_mapped_is_named() -> None:
    layout = single()
    assert refused(layout, evolve(layout, groups=())) == "groups"
    assert refused(layout, regroup(layout, kind="state")) == "groups[0].kind"
    assert refused(layout, regroup(layout, packing=Packing.WHOLE)) == "groups[0].packing"
    assert refused(layout, regroup(layout, replicated=True)) == "groups[0].replicated"
    assert refused(layout, single(cache(2))) == "groups[0].total_heads"
    assert refused(single(block_size=6), single(block_size=4)).startswith("groups[0].block_size (neither")
    for packing in (Packing.WHOLE, Packing.HEADS):
        answer = refused(single(cache(4, packing)), single(cache(4, packing), block_size=8))
        assert answer == f"groups[0].block_size (packing {packing.value} cannot be cut between tokens)"
    whole = cache(4, Packing.WHOLE)
    answer = refused(single(whole), shape(tp=2).layout(whole, 0))
    assert answer == "groups[0].heads (packing whole cannot be cut between heads)"
    wide = (evolve(cache()[0], cell=3),)
    assert refused(layout, single(wide)) == "bytes and pieces of a block of layer 'a'"
    odd = regroup(layout, layers=tuple(evolve(layer, block_bytes=31) for layer in layout.groups[0].layers))
    assert refused(odd, shape(tp=2).layout(cache(), 0)) == "bytes and pieces of a block of layer 'a'"
    assert refused(odd, layout) == "bytes and pieces of a block of layer 'a'"


def test_layers_that_only_one_side_has_are_named() -> None:
    """N1, G3: a draft model's cache is not left out in silence."""
    more = (Cache(("a", "b", "draft"), 4, Packing.TOKENS_HEADS, False, 2),)
    for ours, theirs in ((single(more), single()), (single(), single(more))):
        with pytest.raises(LayoutMismatch, match="draft") as error:
            check(ours, theirs)
        assert error.value.fact == "layers"
    split = shape(1, 4, 9, ("a",), ("b",)).layout(cache(), 1)
    assert refused(split, single(more)) == "layers"


def test_a_layer_in_another_group_is_named() -> None:
    first, second = Cache(("a",), 4, Packing.WHOLE, False, 2), Cache(("b",), 4, Packing.WHOLE, False, 2)
    both = Shape(1, (("a", "b"),), (4, 4))
    swapped = (evolve(first, names=("b",)), evolve(second, names=("a",)))
    assert refused(both.layout((first, second), 0), both.layout(swapped, 0)) == "group of layer 'a'"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"tp_rank": 1}, "tp 1/1"),
        ({"pp_rank": 3}, "pp 3/1"),
        ({"tp_size": 4096, "pp_size": 4096}, "no rank"),
        ({"pp_size": 2}, "0 stages of 2"),
        ({"stages": (("a", "b"),)}, "1 stages of 1"),
        ({"pp_size": 2, "stages": (("a", "b"), ("b",))}, "twice"),
        ({"pp_size": 2, "stages": (("a",), ("b",))}, "layers of the groups and of stage 0 differ"),
        ({"tp_size": 3}, "4 heads cannot be shared by 3 ranks"),
        ({"tp_size": 2}, "heads is 4 of 4 shared by 2"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change: dict[str, object], cause: str) -> None:
    good = single()
    bad = evolve(good, **change)
    for ours, theirs in ((bad, good), (good, bad)):
        with pytest.raises(LayoutMismatch, match=cause) as error:
            check(ours, theirs)
        assert error.value.fact == "soundness"
        assert (error.value.producer if ours is good else error.value.consumer) == "sound"


def test_groups_that_contradict_themselves_are_refused() -> None:
    good = single()
    layer = good.groups[0].layers[0]
    for facts, cause in (
        ({"index": 1}, r"groups\[0\] has index 1"),
        ({"heads": 2}, "heads is 2 of 4"),
        ({"layers": (layer, layer)}, "twice"),
        ({"layers": (evolve(layer, block_bytes=0),)}, "0 bytes"),
        ({"layers": (evolve(layer, stride=31),)}, "32 bytes each 31"),
    ):
        with pytest.raises(LayoutMismatch, match=cause):
            check(regroup(good, **facts), good)
