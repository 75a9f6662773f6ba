"""The list of mutants fits the code; taken out one by one (slow), each rule is missed by its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx_conformance.mutants import Tree, judge
from kvx_conformance.removals import MUTANTS, Mutant

CHECKOUT = Path(__file__).parents[2]


def test_every_rule_has_a_mutant_and_a_third_lie_outside_of_the_states() -> None:
    assert {mutant.rule for mutant in MUTANTS} == {f"R{number}" for number in range(1, 16)}
    outside = [mutant for mutant in MUTANTS if mutant.file not in ("kvx/core/machine.py", "kvx/core/lifecycle.py")]
    assert 3 * len(outside) >= len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule} {mutant.removes}")
def test_its_line_is_there_once_and_its_test_exists(mutant: Mutant) -> None:
    assert (CHECKOUT / mutant.file).read_text().count(mutant.old) == 1
    file, _, name = mutant.test.partition("[")[0].partition("::")
    assert not name or f"def {name}(" in (CHECKOUT / file).read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule} {mutant.removes}")
def test_it_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    verdict = judge(Tree(CHECKOUT, tmp_path), mutant, worlds=0)
    assert verdict.killed, verdict.why
