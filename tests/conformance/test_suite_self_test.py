"""The self-test on subjects made for it: who is found, who is not, and what the matrix says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx_conformance.suite import page, self_test
from kvx_conformance.suite.case import CASES
from kvx_conformance.suite.self_test import Specimen
from kvx_conformance.suite.subject import Subject

MADE = """
import time
from kvx_conformance import faults
from kvx_conformance.suite.case import Profile, case
from kvx_conformance.suite.subject import Feature

@case("KVX-TRN-001", "declares-cancel", "made", needs=[Feature.CANCEL])
def declares_cancel(context): context.check(True, "")

@case("KVX-TRN-001", "is-fast", "made")
def is_fast(context):
    if "slow" in context.subject.options: time.sleep(60)
    context.check(True, "")

@case("KVX-TRN-001", "is-plain", "made")
def is_plain(context):
    context.check(context.subject.options.get("plain", True), f"it is not plain: {context.folder}/log\\nmore")

@case("KVX-TRN-001", "later", "made", profile=Profile.SOAK)
def later(context): context.check(False, "not asked for")

@case("KVX-ENV-001", "of-an-instance", "made")
def of_an_instance(context): context.check(False, "not asked for")

class Made(faults.Wrapper):
    own_options = ("slow", "plain")
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    (tmp_path / "made_specimens.py").write_text(MADE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(CASES)
    CASES.clear()
    importlib.import_module("made_specimens")
    yield ("made_specimens",)
    CASES.clear()
    CASES.update(before)
    del sys.modules["made_specimens"]


def subject(**options: Any) -> Subject:
    return Subject("made_specimens:Made", options)


def matrix(modules: tuple[str, ...], *specimens: Specimen) -> dict[str, Any]:
    return self_test.perform_all(specimens, 2, lambda line: None, modules).fields()


def test_the_broken_are_found_and_the_correct_are_not(modules: tuple[str, ...]) -> None:
    content = matrix(
        modules,
        Specimen("correct", subject()),
        Specimen("crooked", subject(plain=False), "It is not plain.", ("KVX-TRN-001.is-plain",)),
        Specimen("slow", subject(slow=True, plain=False), "It is not plain, and slow.", ("KVX-TRN-001.is-p",)),
    )
    assert content["holds"]
    assert (content["broken"], content["found"], content["correct"]) == (2, 2, 1)
    assert content["cases"] == ["KVX-TRN-001.is-fast", "KVX-TRN-001.is-plain"]
    assert content["unproven"] == ["KVX-TRN-001.declares-cancel"]
    assert "1 of the cases that ran turn red on none" in self_test.lines(content)[-1]
    rows = {row["name"]: row for row in content["subjects"]}
    assert rows["crooked"]["finds"]["KVX-TRN-001.is-plain"]["detail"] == "it is not plain: (a folder of this run)"
    assert [self_test.mark(rows[name], case) for name in rows for case in content["cases"]] == [*"..", *".#", *"h#"]
    assert [len(rows[name]["ran"]) for name in rows] == [3, 3, 3]
    text = "\n".join(self_test.lines(content))
    assert "slow     h#  It is not plain, and slow." in text
    assert "transports" in text and "instances" not in text
    assert "2 of 2 broken subjects" in text
    assert "● " not in page.matrix({**content, "kvx": "0", "suite": "1.0"}).partition("<table")[0].partition("<p><b")[0]


def test_one_that_takes_its_time_is_not_asked_everything(
    modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "BUDGET_S", -1.0)
    specimens = (
        Specimen("correct", subject()),
        Specimen("crooked", subject(plain=False), "Bent.", ("KVX-TRN-001.is-p",)),
    )
    content = self_test.perform_all(specimens, 1, lambda line: None, modules, columns=CASES).fields()
    correct, crooked = content["subjects"]
    assert (len(correct["ran"]), crooked["ran"]) == (3, ["KVX-TRN-001.is-plain"])
    assert content["holds"]
    assert self_test.mark(crooked, "KVX-TRN-001.is-fast") == " "


def test_one_that_its_cases_do_not_find_is_bad_even_if_others_do(modules: tuple[str, ...]) -> None:
    content = matrix(modules, Specimen("hidden", subject(plain=False), "It is hidden.", ("KVX-TRN-001.declares",)))
    assert (content["holds"], content["found"]) == (False, 0)
    assert "NOT FOUND by its cases" in content["subjects"][0]["word"]


@pytest.mark.parametrize(("proves", "holds"), [("is-plain", True), ("is-fast", False)])
def test_each_case_that_it_proves_has_to_fail(modules: tuple[str, ...], proves: str, holds: bool) -> None:
    proven = (f"KVX-TRN-001.{proves}",)
    one = Specimen("crooked", subject(plain=False), "It is bent.", ("KVX-TRN-001.is-plain",), proves=proven)
    content = matrix(modules, one)
    (row,) = content["subjects"]
    assert (content["holds"], row["proves"]) == (holds, list(proven))
    assert (f"NOT FOUND by {proven[0]}" in row["word"]) is not holds


def test_only_the_kinds_that_are_asked_for() -> None:
    found = self_test.subjects(kinds={self_test.Kind.ADAPTER})
    assert {one.kind for one in found} == {self_test.Kind.ADAPTER}
    assert found[0].correct and not found[-1].correct


def test_a_correct_one_that_is_found_is_bad(modules: tuple[str, ...]) -> None:
    content = matrix(modules, Specimen("correct", subject(plain=False)))
    assert not content["holds"]
    assert content["subjects"][0]["word"] == "correct, but 1 cases find fault"


def test_one_that_cannot_be_made_is_bad(modules: tuple[str, ...]) -> None:
    content = matrix(modules, Specimen("gone", Subject("nowhere"), "It is gone.", ("KVX",)))
    assert not content["holds"]
    assert "cannot be tested" in content["subjects"][0]["word"]
