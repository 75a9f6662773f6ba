"""The planner by hand: the hazards of the field, bounds, and what is refused with which words."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvx.core.errors import LayoutMismatch, LocalProtocolError
from kvx.core.layout import check, pairs, plan_leg
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Packing, Part, Role

CELL = 2
"""Bytes per token and head."""


def rank(
    nth: int = 0,
    tp: int = 1,
    *,
    stages: tuple[str, ...] = ("ab",),
    size: int = 4,
    heads: int = 4,
    packing: Packing = Packing.TOKENS_HEADS,
    replicated: bool = False,
    num_blocks: int = 256,
    cell: int = CELL,
) -> Layout:
    """The nth rank of an instance; a stage is a text of one-letter layers, each in a region of its own."""
    stage, position = divmod(nth, tp)
    own = heads if replicated else max(1, heads // tp)
    block = size * own * cell
    layers = tuple(LayerSpec(name, index, 0, block, block) for index, name in enumerate(stages[stage]))
    return Layout(
        "model",
        "int8",
        "test",
        (CacheGroup(0, "full", size, layers, own, heads, packing, replicated),),
        num_blocks,
        tp_rank=position,
        tp_size=tp,
        pp_rank=stage,
        pp_size=len(stages),
        stages=tuple(map(tuple, stages)) if len(stages) > 1 else (),
    )


def relayer(layout: Layout, *layers: LayerSpec) -> Layout:
    return evolve(layout, groups=(evolve(layout.groups[0], layers=layers),))


def interleaved(layout: Layout) -> Layout:
    """All layers of a block side by side, in one region."""
    layers = layout.groups[0].layers
    stride = sum(layer.block_bytes for layer in layers)
    specs = (evolve(layer, region=0, offset=nth * layer.block_bytes, stride=stride) for nth, layer in enumerate(layers))
    return relayer(layout, *specs)


def blocks(ids: list[int] | range, first: int = 0, layers: tuple[str, ...] | None = None) -> Part:
    return Part(layers, (first,), BlockTable.of(ids))


def numbers(producer: Layout, consumer: Layout) -> list[tuple[int, int, bool]]:
    return [(pair.producer, pair.consumer, pair.empty) for pair in pairs(producer, consumer)]


def test_descriptors_of_contiguous_and_alternating_blocks() -> None:
    """M3: 64 blocks in 4 regions."""
    leg = plan_leg(rank(stages=("abcd",)), rank(stages=("abcd",)))
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
        here, there = interleaved(rank(packing=packing)), rank(1, 2, packing=packing, size=4 * ratio)
        forth = plan_leg(here, there).move(ours, theirs)
        back = plan_leg(there, here).move(theirs, ours)
        assert len(forth[0]) == len(back[0]) > 2
        assert sorted(forth[0].pieces()) == sorted(back[1].pieces())


def test_layers_between_each_other_in_one_region_are_one_run() -> None:
    layout = interleaved(rank())
    here, there = plan_leg(layout, layout).move(blocks(range(3, 23)), blocks(range(3, 23)))
    assert here.pieces() == there.pieces() == [(0, 3 * 64, 20 * 64)]


def test_planning_does_not_grow_with_the_pool() -> None:
    """M4: a leg holds numbers per layer, none per block."""
    small, large = plan_leg(rank(), rank()), plan_leg(rank(num_blocks=100_000), rank(num_blocks=100_000))
    sides = [leg._shares[0].sides[Role.PRODUCER] for leg in (small, large)]
    assert [len(side.offset) for side in sides] == [2, 2]
    assert [len(side.grid.inner) for side in sides] == [1, 1]


def test_64_token_blocks_to_16_token_blocks() -> None:
    """F1: 100 tokens, 2 blocks of 64 against 7 blocks of 16."""
    large, small = rank(size=64), rank(size=16)
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


def test_pieces_are_as_large_as_both_sides_allow() -> None:
    five = blocks(range(5))
    for packing, size, tp, count in (
        (Packing.TOKENS_HEADS, 4, 1, 5),
        (Packing.TOKENS_HEADS, 16, 1, 5),
        (Packing.TOKENS_HEADS, 4, 2, 5 * 4),
        (Packing.TOKENS_HEADS, 16, 2, 5 * 4),
        (Packing.HEADS_TOKENS, 4, 2, 5),
        (Packing.HEADS_TOKENS, 16, 1, 5 * 4),
        (Packing.HEADS_TOKENS, 16, 2, 5 * 2),
        (Packing.HEADS, 4, 2, 5),
        (Packing.WHOLE, 4, 1, 5),
    ):
        leg = plan_leg(rank(packing=packing), rank(tp - 1, tp, packing=packing, size=size))
        assert len(leg.units(Role.PRODUCER, five)[1]) == 2 * count


@pytest.mark.parametrize("packing", [Packing.HEADS_TOKENS, Packing.HEADS])
def test_the_second_half_of_the_heads(packing: Packing) -> None:
    here, there = plan_leg(rank(packing=packing), rank(1, 2, packing=packing)).move(blocks([5, 6]), blocks([5, 6]))
    assert here.pieces() == [(layer, block * 32 + 16, 16) for layer in (0, 1) for block in (5, 6)]
    assert there.pieces() == [(layer, block * 16, 16) for layer in (0, 1) for block in (5, 6)]


def test_a_head_of_large_blocks() -> None:
    """Two blocks of 4 tokens make one of 8: head 3 lies 3 * 8 tokens into it."""
    small, large = (rank(nth, 4, packing=Packing.HEADS_TOKENS, size=size) for nth, size in ((3, 4), (3, 8)))
    whole = rank(packing=Packing.HEADS_TOKENS, size=8)
    here, there = plan_leg(whole, small).move(blocks([7]), blocks([1, 4], layers=("b",)))
    assert here.pieces() == [(1, 7 * 64 + 48, 8), (1, 7 * 64 + 56, 8)]
    assert there.pieces() == [(1, 8, 8), (1, 32, 8)]
    here, there = plan_leg(small, large).move(blocks([1, 2]), blocks([3], layers=("a",)))
    assert (here.pieces(), there.pieces()) == ([(0, 8, 16)], [(0, 48, 16)])


def test_all_heads_of_a_replicated_group_in_larger_blocks() -> None:
    small, large = (rank(1, 2, heads=2, packing=Packing.HEADS_TOKENS, replicated=True, size=size) for size in (4, 8))
    here, there = plan_leg(small, large).move(blocks([6, 9]), blocks([3], layers=("a",)))
    assert here.pieces() == [(0, block * 16 + head * 8, 8) for block in (6, 9) for head in (0, 1)]
    assert there.pieces() == [(0, 96 + at, 8) for at in (0, 16, 8, 24)]


def test_keys_of_all_groups_differ() -> None:
    one = rank(stages=("abcd",), size=4).groups[0]
    two = evolve(one, index=1, layers=tuple(evolve(layer, name=layer.name * 2) for layer in one.layers[:3]))
    layout = evolve(rank(), groups=(one, two))
    part = Part(None, (0, 2), BlockTable.of([3, 4, 5, 6], [7, 8]))
    for role in Role:
        pieces, keys = plan_leg(layout, layout).units(role, part)
        assert len(set(keys.tolist())) == len(pieces) == 4 * 4 + 2 * 3


def test_a_digest_tells_legs_apart() -> None:
    instances = [rank(), rank(stages=("ac",)), rank(size=8, cell=1), rank(cell=4), rank(0, 2), rank(1, 2)]
    digests = [plan_leg(layout, layout).digest for layout in instances]
    digests += [plan_leg(rank(), rank(nth, 2, size=size)).digest for nth in (0, 1) for size in (4, 8)]
    assert len(set(digests)) == len(digests)
    assert all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests)


def test_neighbours_in_two_regions_are_two_runs() -> None:
    layout = relayer(rank(), LayerSpec("a", 0, 0, 32, 32), LayerSpec("b", 1, 32, 32, 32))
    here, _ = plan_leg(layout, layout).move(blocks([0]), blocks([0]))
    assert here.pieces() == [(0, 0, 32), (1, 32, 32)]


def test_only_layers_that_both_parts_have_move() -> None:
    leg = plan_leg(rank(stages=("abc",)), rank(stages=("abc",)))
    here, _ = leg.move(blocks([1], layers=("a", "b")), blocks([1], layers=("b", "c", "x")))
    assert here.region.tolist() == [1]
    pieces, keys = leg.units(Role.CONSUMER, blocks([1], layers=("b", "c")), other=blocks([1], layers=("a", "b")))
    assert (pieces.region.tolist(), keys.tolist()) == ([1], [1])


def test_a_rank_and_itself_share_all_of_its_blocks() -> None:
    for nth, tp, heads, replicated in ((3, 4, 8, False), (3, 4, 2, False), (2, 4, 1, True)):
        layout = rank(nth, tp, heads=heads, replicated=replicated)
        size = layout.groups[0].layers[0].block_bytes
        ranges = plan_leg(layout, layout).ranges(Role.CONSUMER, blocks([9, 8, 3]))
        assert ranges.pieces() == [(x, at * size, n * size) for x in (0, 1) for at, n in ((3, 1), (8, 2))]


def test_four_ranks_share_two_heads() -> None:
    """F6: ranks 0 and 1 need head 0, ranks 2 and 3 head 1."""
    legs = [plan_leg(rank(heads=2), rank(nth, 4, heads=2)) for nth in range(4)]
    offsets = [leg.move(blocks([3]), blocks([3]))[0].offset.tolist() for leg in legs]
    block, token, head = 3 * 16, 4, 2
    heads = [[block + at * token + nth * head for at in range(4)] * 2 for nth in range(2)]
    assert offsets == [heads[0], heads[0], heads[1], heads[1]]
    assert numbers(rank(heads=2), rank(2, 4, heads=2)) == [(0, nth, False) for nth in range(4)]


def test_each_head_is_read_once_and_every_rank_released() -> None:
    """F7: four ranks hold two heads; G1: four ranks hold the same bytes."""
    for heads, replicated, tp, expected in (
        (2, False, 1, [(0, 0, False), (1, 0, True), (2, 0, False), (3, 0, True)]),
        (1, True, 1, [(0, 0, False), (1, 0, True), (2, 0, True), (3, 0, True)]),
        (1, True, 2, [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)]),
        (8, True, 1, [(0, 0, False), (1, 0, True), (2, 0, True), (3, 0, True)]),
        (4, True, 4, [(nth, nth, False) for nth in range(4)]),
        (2, False, 4, [(nth, nth, False) for nth in range(4)]),
        (4, False, 2, [(0, 0, False), (1, 0, False), (2, 1, False), (3, 1, False)]),
    ):
        four, others = (rank(0, size, heads=heads, replicated=replicated) for size in (4, tp))
        assert numbers(four, others) == expected


def test_pipeline_stages_meet_by_name() -> None:
    """N4: the consumer holds the layers in another order, a stage sends its own only."""
    staged = [rank(nth, stages=("abcd", "efgh")) for nth in range(2)]
    whole = rank(stages=("hgfedcba",))
    assert numbers(staged[1], whole) == [(0, 0, False), (1, 0, False)]
    here, there = plan_leg(staged[1], whole).move(blocks([1]), blocks([2]))
    by_region = sorted(zip(here.region.tolist(), there.region.tolist(), strict=True))
    assert by_region == [(0, 3), (1, 2), (2, 1), (3, 0)]
    both = plan_leg(staged[0], staged[1])
    assert both.empty
    assert len(both.move(blocks([1]), blocks([2]))[0]) == 0
    assert numbers(staged[0], staged[0]) == [(0, 0, False), (1, 1, False)]


def test_groups_that_are_shared_differently() -> None:
    """Layer a is cut by heads, layer b held by every rank: who needs whom depends on the stage."""

    def mixed(nth: int, tp: int, stages: tuple[str, ...]) -> Layout:
        heads, copies = rank(nth, tp, stages=stages), rank(nth, tp, stages=stages, replicated=True)
        groups = [
            evolve(layout.groups[0], index=index, layers=tuple(x for x in layout.groups[0].layers if x.name == name))
            for index, (layout, name) in enumerate(((heads, "a"), (copies, "b")))
        ]
        return evolve(heads, groups=tuple(groups))

    together, apart = mixed(1, 2, ("ab",)), mixed(0, 1, ("a", "b"))
    assert numbers(together, apart) == [(0, 0, False), (0, 1, False), (1, 0, False)]
    assert numbers(apart, together) == [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, False)]
    # With stages on both sides nobody knows the groups of all layers: the pair (3, 1) is there, its leg is empty.
    staged = [mixed(nth, 2, ("a", "b")) for nth in range(4)]
    assert numbers(staged[0], apart) == [(0, 0, False), (1, 0, False), (2, 1, False), (3, 1, False)]
    assert [plan_leg(staged[nth], mixed(1, 1, ("a", "b"))).empty for nth in (2, 3)] == [False, True]


def test_a_stage_without_layers_still_has_a_pair() -> None:
    split, empty = rank(stages=("a", "b")), rank(stages=("ab", ""))
    assert numbers(split, empty) == [(0, 0, False), (1, 0, False), (1, 1, True)]
    assert numbers(empty, split) == [(0, 0, False), (0, 1, False), (1, 1, True)]


def test_the_tail_of_the_prompt_moves() -> None:
    """H2: the consumer has the first four of six blocks. H3: it has one block more than the producer."""
    leg = plan_leg(rank(), rank())
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
    four = blocks(range(4))
    counts = {
        packing: len(plan_leg(rank(packing=packing, size=16), rank(1, 2, packing=packing, size=16)).move(four, four)[0])
        for packing in (Packing.TOKENS_HEADS, Packing.HEADS_TOKENS, Packing.HEADS)
    }
    assert counts == {Packing.TOKENS_HEADS: 128, Packing.HEADS_TOKENS: 8, Packing.HEADS: 8}


def test_a_part_that_does_not_fit_is_refused() -> None:
    """F11: ids beyond the usable blocks never become addresses."""
    leg = plan_leg(rank(num_blocks=100), rank(num_blocks=10))
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
    change: dict[str, Any] = {fact: "other"}
    assert refused(rank(), evolve(rank(), **change)) == fact


def regroup(layout: Layout, **facts: Any) -> Layout:
    return evolve(layout, groups=tuple(evolve(group, **facts) for group in layout.groups))


def test_what_cannot_be_mapped_is_named() -> None:
    layout = rank()
    assert refused(layout, evolve(layout, groups=())) == "groups"
    assert refused(layout, regroup(layout, kind="state")) == "groups[0].kind"
    assert refused(layout, regroup(layout, packing=Packing.WHOLE)) == "groups[0].packing"
    assert refused(layout, regroup(layout, replicated=True)) == "groups[0].replicated"
    assert refused(layout, rank(heads=2)) == "groups[0].total_heads"
    assert refused(rank(size=6), rank(size=4)).startswith("groups[0].block_size (neither")
    for packing in (Packing.WHOLE, Packing.HEADS):
        answer = refused(rank(packing=packing), rank(packing=packing, size=8))
        assert answer == f"groups[0].block_size (packing {packing.value} cannot be cut between tokens)"
    answer = refused(rank(packing=Packing.WHOLE), rank(0, 2, packing=Packing.WHOLE))
    assert answer == "groups[0].heads (packing whole cannot be cut between heads)"
    assert refused(layout, rank(cell=3)) == "bytes and pieces of a block of layer 'a'"
    odd = relayer(layout, *(evolve(layer, block_bytes=31) for layer in layout.groups[0].layers))
    assert refused(odd, rank(0, 2)) == "bytes and pieces of a block of layer 'a'"
    assert refused(odd, layout) == "bytes and pieces of a block of layer 'a'"
    half, whole = (
        relayer(rank(0, tp), LayerSpec("a", 0, 0, n, n), LayerSpec("b", 1, 0, n, n)) for tp, n in ((2, 3), (1, 6))
    )
    assert refused(half, whole) == "bytes and pieces of a block of layer 'a'"


def test_layers_that_only_one_side_has_are_named() -> None:
    """N1, G3: a draft model's cache is not left out in silence."""
    more = rank(stages=("abd",))
    for ours, theirs in ((more, rank()), (rank(), more)):
        with pytest.raises(LayoutMismatch, match="'d'") as error:
            check(ours, theirs)
        assert error.value.fact == "layers"
    assert refused(rank(1, stages=("a", "b")), more) == "layers"


def test_a_layer_in_another_group_is_named() -> None:
    first, second = rank(stages=("a",)).groups[0], rank(stages=("b",)).groups[0]
    both = evolve(rank(), groups=(first, evolve(second, index=1)))
    swapped = evolve(rank(), groups=(second, evolve(first, index=1)))
    assert refused(both, swapped) == "group of layer 'a'"


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
def test_a_layout_that_contradicts_itself_is_refused(change: dict[str, Any], cause: str) -> None:
    good = rank()
    bad = evolve(good, **change)
    for ours, theirs in ((bad, good), (good, bad)):
        with pytest.raises(LayoutMismatch, match=cause) as error:
            check(ours, theirs)
        assert error.value.fact == "soundness"
        assert (error.value.producer if ours is good else error.value.consumer) == "sound"


def test_groups_that_contradict_themselves_are_refused() -> None:
    good = rank()
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
