"""A side's own blocks: bounds, translated positions, and coverage against sets of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core.blocks import numbered, order
from kvx.core.errors import LocalProtocolError
from kvx.core.layout import Coverage, check_blocks, window
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Part


def layout(*sizes: int, names: tuple[str, ...] = ("ab", "c"), num_blocks: int = 20) -> Layout:
    groups = tuple(
        CacheGroup(
            index,
            "full",
            size,
            tuple(LayerSpec(name, 0, 0, size, size) for name in names[index]),
            heads=1,
            total_heads=1,
        )
        for index, size in enumerate(sizes)
    )
    return Layout("m", "d", "v", groups, num_blocks)


def part(*blocks: tuple[int, list[int]], layers: tuple[str, ...] | None = None) -> Part:
    return Part(layers, tuple(first for first, _ in blocks), BlockTable.of(*(ids for _, ids in blocks)))


@pytest.mark.parametrize(
    ("first", "blocks", "flaw"),
    [
        ((0, 0), ([1, 2, 3], [4, 5]), None),
        ((2, 1), ([19], [0]), None),
        ((3, 0), ([], []), None),
        ((0, 2), ([], []), None),
        ((0,), ([1, 2, 3], [4, 5]), "1 positions and 2 block lists for 2 groups"),
        ((0, 0), ([1, 2, 3],), "2 positions and 1 block lists for 2 groups"),
        ((0, 0, 0), ([1, 2, 3], [4, 5], []), "3 positions and 3 block lists for 2 groups"),
        ((2, 1), ([20], [0]), "groups[0]: block ids 20..20 are not all below 20"),
        ((2, 1), ([3], [-1]), "groups[1]: block ids -1..-1 are not all below 20"),
        ((0, 0), ([1, 2, 1], [4, 5]), "groups[0]: a block comes twice"),
        ((0, 0), ([1, 2], [4, 5]), "groups[0]: 2 blocks from position 0 do not end at 3"),
        ((1, 0), ([1, 2, 3], [4, 5]), "groups[0]: 3 blocks from position 1 do not end at 3"),
        ((0, 0), ([1, 2, 3, 4], [4, 5]), "groups[0]: 4 blocks from position 0 do not end at 3"),
        ((-1, 0), ([1, 2, 3, 4], [4, 5]), "groups[0]: 4 blocks from position -1 do not end at 3"),
        ((0, 3), ([1, 2, 3], []), "groups[1]: 0 blocks from position 3 do not end at 2"),
    ],
)
def test_blocks_are_the_tail_of_the_prompt(first: tuple[int, ...], blocks: tuple[list[int], ...], flaw: str) -> None:
    """H5: 20 tokens are 3 blocks of 8, and 2 of 16; the last ones are partial."""
    assert check_blocks(layout(8, 16), first, BlockTable.of(*blocks), 20) == flaw


def test_window_translates_positions() -> None:
    small, large = layout(16, 16), layout(64, 16)
    assert window((0, 0), small, large, 100) == (0, 0)
    assert window((5, 5), small, large, 100) == (1, 5)
    assert window((1, 5), large, small, 100) == (4, 5)
    assert window((3, 6), small, large, 100) == (0, 6)
    # Nothing stays nothing: 100 tokens are 7 blocks of 16, 2 of 64.
    assert window((7, 7), small, large, 100) == (2, 7)
    assert window((2, 7), large, small, 100) == (7, 7)
    assert window((0, 0), large, small, 0) == (0, 0)


def test_coverage_in_any_order() -> None:
    seen = Coverage(layout(8, 16), 40)
    assert (seen.first(), seen.blocks) == ((5, 3), 0)
    seen.add(part((3, [1, 2]), (2, [9])))
    assert (seen.first(), seen.blocks) == ((3, 2), 3)
    seen.add(part((0, [3]), (0, []), layers=("a",)))
    assert (seen.first(), seen.blocks) == ((3, 2), 4)
    seen.add(part((1, [4, 5]), (0, []), layers=("b",)))
    assert (seen.first(), seen.blocks) == ((3, 2), 6)
    seen.add(part((1, [4, 5]), (0, []), layers=("a",)))
    assert (seen.first(), seen.blocks) == ((1, 2), 6)
    seen.add(part((0, [3]), (0, [7, 8]), layers=("b", "c")))
    assert (seen.first(), seen.blocks) == ((0, 0), 8)


def test_coverage_of_a_gap_before_the_end() -> None:
    seen = Coverage(layout(8, names=("a",)), 40)
    seen.add(part((0, [1, 2, 3])))
    assert (seen.first(), seen.blocks) == ((5,), 3)
    seen.add(part((4, [4])))
    assert seen.first() == (4,)
    seen.add(part((3, [5])))
    assert seen.first() == (0,)


def test_blocks_of_layers_that_a_part_does_not_name_are_not_handed_over() -> None:
    seen = Coverage(layout(8, 16), 40)
    seen.add(part((0, [0, 1, 2, 3, 4]), (0, [0, 1, 2]), layers=("c",)))
    assert (seen.first(), seen.blocks) == ((5, 0), 3)
    seen.add(part((0, [0, 1, 2, 3, 4]), (0, []), layers=("a", "b")))
    assert (seen.first(), seen.blocks) == ((0, 0), 8)


def test_a_group_without_layers_on_this_rank_counts_with_its_blocks() -> None:
    seen = Coverage(layout(8, 16, names=("ab", "")), 40)
    assert seen.first() == (5, 3)
    seen.add(part((0, [0, 1, 2, 3, 4]), (1, [1, 2]), layers=("a",)))
    assert seen.first() == (5, 1)
    seen.add(part((0, [0, 1, 2, 3, 4]), (1, [1, 2]), layers=("b",)))
    assert seen.first() == (0, 1)


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (part((0, [7]), (0, []), layers=("x",)), "no layer 'x'"),
        (part((0, [7])), "1 block lists for 2 groups"),
        (Part(None, (0,), BlockTable.of([7], [8])), "2 block lists for 2 groups"),
        (part((0, [20]), (0, [])), "20..20"),
        (part((0, [-1]), (0, [])), "-1..-1"),
        (part((0, [7, 7]), (0, [])), "twice"),
        (part((0, [7]), (0, [3, 3])), "groups.1.: a block comes twice"),
        (part((4, [7, 8]), (0, [])), "positions 4..5 are not in the prompt"),
        (part((-1, [7]), (0, [])), "positions -1..-1 are not in the prompt"),
        (part((0, [7]), (2, [8, 9])), "positions 2..3 are not in the prompt"),
        (part((1, [7, 8]), (0, [])), "layer 'a' had some of positions 1..2 before"),
        (part((0, [7]), (0, [8, 9])), "layer 'c' had some of positions 0..1 before"),
    ],
)
def test_a_bad_part_changes_nothing(bad: Part, cause: str) -> None:
    seen = Coverage(layout(8, 16), 40)
    seen.add(part((2, [1, 2, 3]), (1, [1, 2])))
    with pytest.raises(LocalProtocolError, match=cause):
        seen.add(bad)
    assert (seen.first(), seen.blocks) == ((2, 1), 5)
    seen.add(part((0, [4, 5]), (0, [9])))
    assert (seen.first(), seen.blocks) == ((0, 0), 8)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(
        st.tuples(
            st.none() | st.sets(st.sampled_from("abc"), min_size=1).map(lambda names: tuple(sorted(names))),
            st.tuples(st.integers(0, 7), st.integers(0, 3)),
            st.tuples(st.integers(0, 7), st.integers(0, 3)),
        ),
        max_size=12,
    ),
)
def test_coverage_is_a_set_of_positions(
    tokens: int, calls: list[tuple[tuple[str, ...] | None, tuple[int, int], tuple[int, int]]]
) -> None:
    own = layout(8, 16)
    seen = Coverage(own, tokens)
    ends = [-(-tokens // group.block_size) for group in own.groups]
    model: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
    group_of = {"a": 0, "b": 0, "c": 1}
    for layers, *spans in calls:
        given_part = part(*((first, list(range(count))) for first, count in spans), layers=layers)
        wanted = {
            name: set(range(spans[group_of[name]][0], sum(spans[group_of[name]]))) for name in layers or ("a", "b", "c")
        }
        beyond = any(count and first + count > end for (first, count), end in zip(spans, ends, strict=True))
        if beyond or any(model[name] & positions for name, positions in wanted.items()):
            with pytest.raises(LocalProtocolError):
                seen.add(given_part)
        else:
            seen.add(given_part)
            for name, positions in wanted.items():
                model[name] |= positions
        complete = [model["a"] & model["b"], model["c"]]
        expected = tuple(
            min(f for f in range(end + 1) if set(range(f, end)) <= whole)
            for whole, end in zip(complete, ends, strict=True)
        )
        assert seen.first() == expected
        assert seen.blocks == len(model["a"] | model["b"]) + len(model["c"])


@pytest.mark.parametrize("highest", [40, 40_000], ids=["counted", "sorted"])
def test_ids_that_are_many_or_few_of_the_possible_ones(highest: int) -> None:
    ids = [7, highest, 0, 3]
    assert numbered(ids, highest + 1).tolist() == ids
    assert order(np.array(ids), highest + 1).tolist() == [2, 3, 0, 1]
    with pytest.raises(ValueError, match="a block comes twice"):
        numbered([7, highest, 7], highest + 1)
    for outside in ([7, highest + 1], [7, -1], [7, 2**63]):
        with pytest.raises(ValueError, match=f"not all below {highest + 1}"):
            numbered(outside, highest + 1)
    assert numbered([], highest).tolist() == []
