"""The table of hazards names only what exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from kvx_conformance import hazards
from kvx_conformance.catalogue import SCENARIOS
from kvx_conformance.hazards import Hazard, Verdict

ROOT = Path(__file__).parents[2]
SIZES = {"A": 15, "B": 17, "C": 17, "D": 12, "E": 11, "F": 13, "G": 7, "H": 10, "I": 7, "J": 13, "K": 9}
SIZES |= {"L": 6, "M": 8, "N": 6, "O": 6}


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of the tests in a file, engine tests too, which cannot be imported everywhere."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_entry_of_the_catalogue_is_there_once() -> None:
    assert [hazard.id for hazard in hazards.load()] == [
        f"{area}{n + 1}" for area, size in SIZES.items() for n in range(size)
    ]
    assert SIZES.keys() == hazards.AREAS.keys()
    assert sum(SIZES.values()) == 157
    assert len(set(hazards.STARRED)) == 25


@pytest.mark.parametrize("hazard", hazards.load(), ids=lambda hazard: hazard.id)
def test_what_is_named_exists(hazard: Hazard) -> None:
    assert bool(hazard.by) == (hazard.verdict is Verdict.COVERED)
    assert bool(hazard.why) == (hazard.verdict is not Verdict.COVERED)
    assert "issue" in hazard.why or hazard.verdict is not Verdict.OPEN
    for name in hazard.by:
        if "::" not in name:
            assert name in SCENARIOS
            continue
        path, _, test = name.partition("::")
        assert test in names_in(ROOT / path), name


def test_the_starred_ones_are_covered_by_scenarios_with_stable_ids() -> None:
    by_id = {hazard.id: hazard for hazard in hazards.load()}
    for name in hazards.STARRED:
        shown = {scenario for scenario in by_id[name].by if scenario in SCENARIOS}
        assert any(name in SCENARIOS[scenario].hazards for scenario in shown), name


def test_a_mutant_is_named_where_it_turns_a_named_test_red() -> None:
    by_id = {hazard.id: hazard for hazard in hazards.load()}
    assert "quarantine ends with proof only" in by_id["A1"].mutants
    assert by_id["M3"].mutants == []
    assert sum(bool(hazard.mutants) for hazard in hazards.load()) >= 30
