"""The suite itself: kvx's own transport and instance keep the protocol, and the broken ones are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

CORE_S = 900
"""The core takes a minute on two idle cores; a test run has other workers beside it."""
SELF_TEST_S = 1800


def conformance(*words: str, limit_s: float) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvx", "conformance", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def bad(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{case['id']} {case['verdict']}: {case['detail']}\n{case['trace']}"
        for case in report["cases"]
        if case["verdict"] != "pass"
    ]


@pytest.mark.timeout(CORE_S)
def test_tcp_keeps_the_protocol() -> None:
    pace = "3" if "PYTEST_XDIST_WORKER" in os.environ else "1"
    status, report = conformance("run", "--transport", "tcp", "--jobs", "2", "--pace", pace, limit_s=CORE_S)
    assert bad(report) == []
    assert (status, report["holds"], report["partial"]) == (0, True, False)
    assert report["verdicts"]["pass"] == len(report["cases"]) > 200
    assert report["declared"]["ops"] == ["read", "write"]
    assert all(case["checks"] for case in report["cases"])


@pytest.mark.slow
@pytest.mark.timeout(CORE_S)
def test_the_reference_engine_keeps_the_protocol() -> None:
    status, report = conformance("run", "--adapter", "reference", limit_s=CORE_S)
    assert bad(report) == []
    assert (status, report["holds"]) == (0, True)
    assert {case["rule"] for case in report["cases"]} >= {f"KVX-ADP-00{number}" for number in range(1, 5)}


@pytest.mark.slow
@pytest.mark.timeout(CORE_S)
def test_an_engine_whose_bytes_are_dropped_is_found() -> None:
    words = ("--adapter", "reference", "--transport", "kvx_conformance.faults:dropping", "--only", "KVX-ADP-001")
    status, report = conformance("run", *words, limit_s=CORE_S)
    assert (status, report["verdicts"]["fail"]) == (1, 4)  # tokens and beginnings, in each mode
    assert all("instead of" in case["detail"] for case in report["cases"])


@pytest.mark.slow
@pytest.mark.timeout(CORE_S)
def test_a_broken_adapter_is_found() -> None:
    words = ("self-test", "--only", "turns_blocks_round", "--only", "calls_failures_good")
    status, report = conformance(*words, limit_s=CORE_S)
    assert [row["name"] + ": " + row["word"] for row in report["subjects"] if not row["holds"]] == []
    assert (status, report["broken"], {row["kind"] for row in report["subjects"]}) == (0, 3, {"adapter"})


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(SELF_TEST_S)
def test_each_broken_subject_is_found_by_a_case_that_names_the_cause_and_no_correct_one() -> None:
    status, report = conformance("self-test", limit_s=SELF_TEST_S)
    assert [row["name"] + ": " + row["word"] for row in report["subjects"] if not row["holds"]] == []
    assert (status, report["holds"], report["found"]) == (0, True, report["broken"])
    assert report["broken"] >= 50
    assert report["correct"] >= 8
