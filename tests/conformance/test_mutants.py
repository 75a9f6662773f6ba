"""The list of mutants fits the code, and who survives is named (`make test-deep` takes them all out)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvx_conformance import mutants
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One rule, `limit`, with a test that knows it and one that does not."""
    (tmp_path / "kvx").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "kvx" / "rule.py").write_text("def limit(n):\n    return min(n, 8)\n")
    (tmp_path / "tests" / "test_rule.py").write_text(
        "import runpy\nlimit = runpy.run_path('kvx/rule.py')['limit']\n"
        "def test_knows(): assert limit(9) == 8\n"
        "def test_blind(): assert limit(7) == 7\n"
        "def test_wrong(): assert limit(7) == 8\n"
    )
    return tmp_path


def removal(test: str, old: str = "min(n, 8)") -> Mutant:
    return Mutant("R1", f"{test} {old}", "kvx/rule.py", old, "n", f"tests/test_rule.py::test_{test}")


def test_who_survives_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "MUTANTS", (removal("knows"), removal("blind"), removal("knows", "max(n, 8)")))
    assert mutants.main(["--tree", str(checkout), "--jobs", "2", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [result["killed"] for result in json.loads(out)["results"]] == [True, False, False]
    assert "1 of 3 killed" in err
    assert "has 0 times: max(n, 8)" in err
    assert mutants.main(["--tree", str(checkout), "--only", "knows min(n, 8)"]) == 0
    assert (checkout / "kvx" / "rule.py").read_text().count("min(n, 8)") == 1


def test_a_test_that_fails_anyway_kills_nobody(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "MUTANTS", (removal("wrong"),))
    assert mutants.main(["--tree", str(checkout)]) == 1
    assert "without any edit: 1 failed" in capsys.readouterr().err
