"""By which broken subject each case is shown to be able to fail: read from kept runs of `kvx conformance self-test`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def load(folder: Path) -> list[dict[str, Any]]:
    """The kept matrices, `self-test-*.json`."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("self-test-*.json"))]


def table(matrices: Iterable[Mapping[str, Any]], ids: Iterable[str]) -> str:
    """As Markdown: a row for each of `ids`, the cases there are. What no subject met has no entry in either column.

    A case is shown by its own fault if it was named beforehand for a subject that it found. Of the others it is known
    that they can fail, and not that they fail at what their sentence says.
    """
    own: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}
    ran: set[str] = set()
    for row in (row for content in matrices for row in content["subjects"]):
        ran.update(row["ran"])
        for case, find in row["finds"].items():
            (own if find["named"] else other).setdefault(case, []).append(row["name"])
    cases = sorted(set(ids))
    met = [case for case in cases if case in ran]
    by_own = [case for case in met if case in own]
    by_other = [case for case in met if case in other and case not in own]
    neither = [f"`{case}`" for case in met if case not in own and case not in other]
    head = (
        f"Of {len(cases)} cases, all profiles, {len(met)} met a subject. {len(by_own)} were turned red by a fault they "
        f"were named for, {len(by_other)} by another fault only, {len(neither)} by none"
        f"{': ' + ', '.join(neither) if neither else ''}."
    )
    rows = [f"| `{case}` | {_cell(own.get(case, []))} | {_cell(other.get(case, []))} |" for case in met]
    return "\n".join([head, "", "| case | named for, and found | found too |", "|---|---|---|", *rows]) + "\n"


def _cell(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
