"""Reports that are kept, and the table of what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvx_conformance.suite import report
from kvx_conformance.suite.result import BAD

SUFFIXES = ("md", "html", "json")


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The kept reports by their file's name, transports first.

    Raises ValueError for one that was changed, does not speak of the whole profile, or lacks a page.
    """
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    for name, content in found.items():
        if report.digest(content) != content["digest"]:
            raise ValueError(f"{name}.json is not what was written: its digest differs")
        if content["partial"]:
            raise ValueError(f"{name}.json does not speak of the whole profile")
        for suffix in SUFFIXES:
            if content["digest"] not in (folder / f"{name}.{suffix}").read_text(encoding="utf-8"):
                raise ValueError(f"{name}.{suffix} is not of the run that {name}.json tells of")
    return dict(sorted(found.items(), key=lambda item: (bool(item[1]["target"]["adapter"]), item[0])))


def table(reports: Mapping[str, Mapping[str, Any]], link: str) -> str:
    """As Markdown; `link` is the path of their folder from where the table stands."""
    head = "| target | over | suite | passed | not declared | left out | bad | run | report |"
    rows = [_row(name, content, link) for name, content in reports.items()]
    return "\n".join([head, "|---" * 9 + "|", *rows]) + "\n"


def _row(name: str, content: Mapping[str, Any], link: str) -> str:
    target, counts = content["target"], content["verdicts"]
    engine = target["engine"]
    what = f"engine {engine['name']} {engine['version']}" if engine else f"transport {target['name']}"
    by = target["adapter_distribution"] or target["distribution"] or "no distribution"
    bad = sum(counts[verdict.value] for verdict in BAD)
    cells = [
        f"{what} ({by})",
        target["transport"] if engine else "",
        f"{content['suite']}, {content['profile']}",
        str(counts["pass"]),
        str(counts["skip_undeclared"]),
        str(counts["disabled"]),
        str(bad),
        content["date"][:10],
        ", ".join(f"[{suffix}]({link}/{name}.{suffix})" for suffix in SUFFIXES),
    ]
    return f"| {' | '.join(cells)} |"
