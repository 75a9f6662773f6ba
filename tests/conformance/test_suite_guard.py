"""The standard list is what the cases are, and whoever takes a case out or replaces one is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import evolve

from kvx_conformance import rules
from kvx_conformance.suite import standard
from kvx_conformance.suite.all import CASES
from kvx_conformance.suite.case import Case, Context, Profile

FIRST = next(name for name in standard.load() if "ADP" not in name)
REMOVES = f"from kvx_conformance.suite.case import CASES\ndel CASES[{FIRST!r}]\n"
OVERRIDES = f"""
from attrs import evolve
from kvx_conformance.suite.case import CASES
def easier(context): context.check(True, "")
CASES[{FIRST!r}] = evolve(CASES[{FIRST!r}], run=easier)
"""


def kvx(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvx", "conformance", *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": str(folder)},
    )


def changed(**facts: object) -> dict[str, Case]:
    return {**CASES, FIRST: evolve(CASES[FIRST], **facts)}


def easier(context: Context) -> None:
    context.check(True, "")


def test_the_list_is_current() -> None:
    assert standard.FILE.read_text() == standard.table(CASES), "python -m kvx_conformance.suite.standard --write"
    assert standard.problems(CASES) == []
    assert set(tomllib.loads(standard.FILE.read_text())) == set(CASES)


def test_a_case_beside_the_list_is_nobodys_fault() -> None:
    assert standard.problems({**CASES, "KVX-ENV-001.mine": evolve(CASES[FIRST], name="mine")}) == []


@pytest.mark.parametrize(
    ("cases", "sentence"),
    [
        ({name: case for name, case in CASES.items() if name != FIRST}, f"standard case {FIRST} is missing"),
        (changed(run=easier), "was overridden"),
        (changed(profile=Profile.SOAK), "has changed its profile: soak"),
    ],
    ids=["missing", "overridden", "profile"],
)
def test_each_change_is_named_unless_it_is_exempt(cases: Mapping[str, Case], sentence: str) -> None:
    (problem,) = standard.problems(cases)
    assert sentence in problem
    assert standard.problems(cases, [FIRST]) == []


def test_a_weaker_sentence_is_noticed() -> None:
    should = next(rule.id for rule in rules.load()[1] if "MUST" not in rule.text)
    (problem,) = standard.problems(changed(rule=should))
    assert "has changed its level: SHOULD instead of MUST" in problem


@pytest.mark.parametrize(
    "command", [("run", "--transport", "tcp"), ("list",), ("self-test",)], ids=lambda words: words[0]
)
@pytest.mark.parametrize(
    ("text", "word"), [(REMOVES, "is missing"), (OVERRIDES, "was overridden")], ids=["missing", "other"]
)
def test_the_commands_refuse_a_changed_suite(tmp_path: Path, command: tuple[str, ...], text: str, word: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    done = kvx(tmp_path, *command, "--cases", "mine")
    assert done.returncode == 2
    assert f"standard case {FIRST} {word}" in done.stderr
    assert "--exempt" in done.stderr
    assert done.stdout == ""


def test_with_a_reason_the_rest_may_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OVERRIDES)
    words = ("run", "--transport", "tcp", "--cases", "mine", "--only", FIRST, "--json")
    done = kvx(tmp_path, *words, "--exempt", f"{FIRST}=our switch drops it")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["exempt"] == [{"id": FIRST, "reason": "our switch drops it"}]
    assert report["verdicts"]["disabled"] == 1
    empty = kvx(tmp_path, *words, "--exempt", f"{FIRST}= ")
    assert (empty.returncode, "needs a reason" in empty.stderr) == (2, True)
