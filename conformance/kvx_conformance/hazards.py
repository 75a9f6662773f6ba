"""Known faults of real systems, and what shows that kvx does not have them; docs/hazards.md is made from this.

The ids are those of the catalogue of public reports that the design was written against.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from enum import Enum
from pathlib import Path

from attrs import frozen

from kvx_conformance.removals import MUTANTS

FILE = Path(__file__).with_name("hazards.toml")
STARRED = (
    *("A1", "A2", "A3", "A5", "B1", "B2", "B6", "B7", "B9", "C1", "C2", "C8", "C16", "D1", "D2"),
    *("F3", "F6", "G3", "H1", "H2", "I4", "J1", "J2", "K1", "O1"),
)
"""What an implementation has to show first."""
AREAS = {
    "A": "Abort, delayed free, leaks",
    "B": "Stale writes, blocks that are used after they were freed",
    "C": "Failures that nobody hears of",
    "D": "Crash, restart, identity",
    "E": "Handshake, ports, metadata",
    "F": "Unequal ranks, blocks and layouts",
    "G": "State that is not plain attention",
    "H": "Prefix hits and partial transfers",
    "I": "Preemption and chunked prefill",
    "J": "Notifications, ids, duplicates",
    "K": "Leases, clocks, time limits",
    "L": "Metrics and logs",
    "M": "Registration, descriptors, buffers",
    "N": "Speculative decoding, pipelines",
    "O": "Routing and security",
}


class Verdict(Enum):
    """COVERED: the named tests and scenarios fail where the fault is back. OPEN: nothing shows it yet."""

    COVERED = "covered"
    CANNOT_OCCUR = "cannot occur"
    OPEN = "open"


@frozen
class Hazard:
    """`by` names scenarios (KVX-...) and tests; `why` says why there are none."""

    id: str
    fault: str
    verdict: Verdict
    by: tuple[str, ...]
    why: str

    @property
    def starred(self) -> bool:
        return self.id in STARRED

    @property
    def mutants(self) -> list[str]:
        """The rules whose removal turns one of the named tests red."""
        return [mutant.removes for mutant in MUTANTS if mutant.test in self.by]


def load() -> list[Hazard]:
    """All entries, in the catalogue's order."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return [
        Hazard(name, entry["fault"], Verdict(entry["verdict"]), tuple(entry.get("by", ())), entry.get("why", ""))
        for name, entry in content.items()
    ]


def table() -> str:
    """Counts, and one table for each area, as Markdown."""
    found = load()
    counts = Counter(hazard.verdict for hazard in found)
    starred = Counter(hazard.verdict for hazard in found if hazard.starred)
    rows = [f"| {verdict.value} | {counts[verdict]} | {starred[verdict]} |" for verdict in Verdict]
    parts = ["\n".join(["| verdict | entries | of these starred |", "|---|---|---|", *rows])]
    for area, title in AREAS.items():
        head = [
            "| id | fault | verdict | shown by, or why not | removed rules that it notices |",
            "|---|---|---|---|---|",
        ]
        parts.append("\n".join([f"## {title}", "", *head, *(_row(one) for one in found if one.id[0] == area)]))
    return "\n\n".join(parts) + "\n"


def _row(hazard: Hazard) -> str:
    shown = ", ".join(_short(name) for name in hazard.by) or hazard.why
    star = "★ " if hazard.starred else ""
    return f"| {star}{hazard.id} | {hazard.fault} | {hazard.verdict.value} | {shown} | {'; '.join(hazard.mutants)} |"


def _short(name: str) -> str:
    return f"`{name.removeprefix('tests/')}`" if "::" in name else name
