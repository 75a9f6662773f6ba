"""Which case is shown by which broken subject: read from matrices, not from what is hoped for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvx_conformance.suite import proofs


def row(name: str, ran: list[str], **named: bool) -> dict[str, Any]:
    return {"name": name, "ran": ran, "finds": {case: {"named": value} for case, value in named.items()}}


def test_a_case_is_shown_by_its_own_fault_by_anothers_or_not_at_all() -> None:
    first = {"subjects": [row("correct", ["a", "b", "c"]), row("bent", ["a", "b", "c"], a=True, b=False)]}
    second = {"subjects": [row("crooked", ["a", "gone"], a=False, gone=True)]}
    head, *lines = proofs.table([first, second], ["c", "b", "a", "d"]).splitlines()
    assert head.startswith("Of 4 cases, all profiles, 3 met a subject. 1 were turned red by a fault they were named")
    assert head.endswith("1 by another fault only, 1 by none: `c`.")
    assert lines[3:] == ["| `a` | bent | crooked |", "| `b` |  | bent |", "| `c` |  |  |"]


def test_the_kept_runs_are_what_is_read() -> None:
    matrices = proofs.load(Path(__file__).parents[2] / "docs" / "evidence")
    undeclared = [one for one in matrices for each in one["subjects"] if each["name"] == "reads-undeclared"]
    assert len(matrices) >= 4
    assert [one["unproven"] for one in undeclared] == [[]]
