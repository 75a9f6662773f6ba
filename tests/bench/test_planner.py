from __future__ import annotations

import numpy as np
import pytest

from kvx.bench import planner
from kvx.core.model import BlockTable, Part


def part(*blocks: int) -> Part:
    return Part(None, (0,), BlockTable.of(blocks))


def test_fresh_blocks_merge_fragmented_ones_do_not_and_random_ones_do_where_they_can() -> None:
    fresh, fragmented, mixed = planner.run(blocks=50, layers=3, repeat=4)["results"]
    assert (fresh["case"], fresh["pieces"], fresh["descriptors"], len(fresh["samples"])) == ("fresh", 150, 3, 4)
    assert (fragmented["case"], fragmented["pieces"], fragmented["descriptors"]) == ("fragmented", 150, 150)
    assert mixed["case"] == "random"
    assert 3 < mixed["descriptors"] < 150
    for result in (fresh, fragmented, mixed):
        for ms in (result["ms"], result["loop_ms"]):
            assert 0 < ms["min"] <= ms["median"] <= ms["p99"] <= ms["max"]
            assert ms["min"] <= ms["mean"] <= ms["max"]
        assert result["faster"] > 0


def test_the_count_of_least_runs() -> None:
    assert planner.least_runs(part(4, 5, 6), part(1, 2, 3)) == 1
    assert planner.least_runs(part(6, 4, 5), part(3, 1, 2)) == 1  # their order in the request does not matter
    assert planner.least_runs(part(4, 5, 6), part(1, 2, 4)) == 2
    assert planner.least_runs(part(4, 5, 6), part(3, 2, 1)) == 3


def test_the_plain_loop_merges_what_is_contiguous_on_both_sides() -> None:
    layout = planner._layout(8, 2, 10)
    ranges = planner.plain_loop(layout, part(5, 4, 1), part(3, 2, 7))
    assert ranges == [[0, 10, 0, 70, 10], [0, 40, 0, 20, 20], [1, 10, 1, 70, 10], [1, 40, 1, 20, 20]]
    with pytest.raises(ValueError, match="block 8 of 8"):
        planner.plain_loop(layout, part(8), part(0))


def test_a_planner_that_misses_a_merge_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "least_runs", lambda *parts: 1)
    with pytest.raises(AssertionError, match="are needed"):
        planner.run(8, 1, ["fragmented"], repeat=1)


def test_floors_have_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planner.run
    monkeypatch.setattr(
        planner, "run", lambda blocks, layers, cases, *, repeat: run(blocks // 64, layers, cases, repeat=repeat)
    )
    found = planner.floors(repeat=1)
    assert [(row["case"], row["blocks"] * 64, row["layers"]) for row in found["results"]] == [
        ("fresh", 131_072, 1),
        ("random", 131_072, 1),
        ("random", 4096, 32),
        ("fresh", 1024, 32),
    ]
    assert [row["pieces"] for row in found["unequal_tp"]] == [16 * 1024, 16 * 4096]
    assert [floor["limit"] for floor in found["floors"]] == [20, 5, 5, 20, 1, 1.5]
    for floor in found["floors"]:
        assert floor["met"] == (
            floor["value"] >= floor["limit"] if floor["least"] else floor["value"] <= floor["limit"]
        )
    assert len(planner.lines(found)) == 10


def test_random_tables_hold_each_block_once_in_runs() -> None:
    ids = np.array(planner._part("random", 1000, 1).blocks.groups[0])
    assert sorted(ids.tolist()) == list(range(1000))
    assert 100 < int((np.diff(ids) != 1).sum()) < 400


def test_cases_and_sizes_are_checked() -> None:
    assert [result["case"] for result in planner.run(2, 1, ["fragmented"], repeat=1)["results"]] == ["fragmented"]
    with pytest.raises(ValueError, match="no such case: worst"):
        planner.run(cases=["worst"])
    with pytest.raises(ValueError, match="at least 1"):
        planner.run(blocks=0)
