"""A report as Markdown: what a repository's own pages show of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvx_conformance import rules
from kvx_conformance.suite import report
from kvx_conformance.suite.case import Verdict


def render(content: Mapping[str, Any]) -> str:
    """The whole run on one page; sentences, titles and traces are in the JSON and in the HTML page."""
    parts = [
        f"# {content['target']['name']}: kvx conformance",
        f"{report.about(content['target'])}.",
        f"**{report.verdict(content)}**",
        _table(("fact", "of this run"), report.facts(content).items()),
        "## In numbers",
        _numbers(content),
    ]
    bad = [case for case in content["cases"] if report.is_bad(case)]
    if bad:
        parts += ["## What is bad, and why", *map(_bad, bad)]
    titles = rules.load()[0]
    for letters in content["by_area"]:
        cases = [case for case in content["cases"] if case["area"] == letters]
        parts += [f"## {titles[letters]} (KVX-{letters})", _cases(cases)]
    parts += ["## Reproduce", f"```console\n$ {content['reproduce']}\n```"]
    parts += [f"Digest of the JSON report: `{content['digest']}`."]
    return "\n\n".join(parts) + "\n"


def _numbers(content: Mapping[str, Any]) -> str:
    levels = sorted(content["by_level"])
    rows = []
    for verdict in Verdict:
        counts = [content["by_level"][level][verdict.value] for level in levels]
        rows.append((f"`{verdict.value}`", *map(str, counts), str(content["provisional"][verdict.value])))
    return _table(("verdict", *levels, "provisional, not counted"), rows)


def _cases(cases: list[Mapping[str, Any]]) -> str:
    rows = [(f"`{case['id']}`", case["level"], _verdict(case), f"{case['seconds']:.2f}") for case in cases]
    return _table(("case", "level", "verdict", "seconds"), rows)


def _verdict(case: Mapping[str, Any]) -> str:
    notes = [text for key, text in (("standard", "beside the standard list"),) if not case[key]]
    notes += ["provisional"] if case["provisional"] else []
    notes += [case["detail"]] if case["verdict"] in ("skip_undeclared", "disabled") else []
    return f"{case['verdict']}{': ' if notes else ''}{'; '.join(notes)}"


def _bad(case: Mapping[str, Any]) -> str:
    new = " (provisional, not counted)" if case["provisional"] else ""
    return f"`{case['id']}` {case['verdict']}{new}: {_cell(case['detail'])}. Promised: {_cell(case['sentence'])}"


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """On one line, and no end of a cell."""
    return " ".join(text.split()).replace("|", "\\|")
