from __future__ import annotations

import pytest

from kvx.bench import planner


def test_fresh_blocks_merge_and_fragmented_ones_do_not() -> None:
    fresh, fragmented = planner.run(blocks=50, layers=3, repeat=4)["results"]
    assert (fresh["case"], fresh["pieces"], fresh["descriptors"], len(fresh["samples"])) == ("fresh", 150, 3, 4)
    assert (fragmented["case"], fragmented["pieces"], fragmented["descriptors"]) == ("fragmented", 150, 150)
    for result in (fresh, fragmented):
        ms = result["ms"]
        assert 0 < ms["min"] <= ms["median"] <= ms["p99"] <= ms["max"]
        assert ms["min"] <= ms["mean"] <= ms["max"]


def test_cases_and_sizes_are_checked() -> None:
    assert [result["case"] for result in planner.run(2, 1, ["fragmented"], repeat=1)["results"]] == ["fragmented"]
    with pytest.raises(ValueError, match="no such case: worst"):
        planner.run(cases=["worst"])
    with pytest.raises(ValueError, match="at least 1"):
        planner.run(blocks=0)
