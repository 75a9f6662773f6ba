"""docs/operations.md: whatever the code can tell an operator has a line that says what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvx.core import errors, model
from kvx.router import policy

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """What stands as code in the first cell of a table's lines."""
    return {name for line in text.splitlines() if line.startswith("|") for name in cells(line)}


def cells(line: str) -> list[str]:
    return [re.sub(r"\{.*", "", code) for code in re.findall(r"`([^`]+)`", line.split("|")[1])]


def calls() -> Iterator[ast.Call]:
    for path in ROOT.joinpath("kvx/router").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield node


def answers() -> set[str]:
    """The types of error that the router makes: `Failure(status, kind, ...)`, or the same of a class made of it."""
    found: set[str] = set()
    for call in calls():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in ("Failure", "__init__") and len(call.args) > 2 and isinstance(call.args[1], ast.Constant):
            found.add(str(call.args[1].value))
    return found


def metrics() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.joinpath("kvx/router").glob("*.py"))
    return set(re.findall(r'"(kvx_router_[a-z_]+)"', text))


def exceptions() -> set[str]:
    return {
        name
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.KvxError) and one is not errors.KvxError
    }


SAID = {
    "reason of a transfer": {one.value for one in model.Reason},
    "reason of a mode": {one.value for one in policy.Reason} - {policy.Reason.SET.value},
    "answer of the router": answers(),
    "metric of the router": metrics(),
    "exception": exceptions(),
}


@pytest.mark.parametrize("kind", SAID)
def test_each_has_its_line(kind: str) -> None:
    assert len(SAID[kind]) >= 5, "the code is read wrongly"
    assert SAID[kind] - first_cells(PAGE) == set()


def test_no_line_is_about_what_is_not_told() -> None:
    section = PAGE.partition("## What do I see, and what do I do")[2]
    assert first_cells(section) - set().union(*SAID.values()) == set()
