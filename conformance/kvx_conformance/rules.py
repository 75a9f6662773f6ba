"""The protocol's sentences, each with an id that stays: what an implementation MUST and SHOULD do."""

from __future__ import annotations

import tomllib
from pathlib import Path

from attrs import frozen

FILE = Path(__file__).with_name("rules.toml")


@frozen
class Rule:
    """`basis` names the rules of the design (R1 to R15) that the sentence follows from."""

    id: str
    basis: tuple[str, ...]
    text: str

    @property
    def area(self) -> str:
        return self.id.split("-")[1]


def load() -> tuple[dict[str, str], list[Rule]]:
    """The areas by their letters, and all sentences in order."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return content["areas"], [Rule(rule["id"], tuple(rule["basis"]), rule["text"]) for rule in content["rules"]]


def table() -> str:
    """One table for each area, as Markdown."""
    areas, rules = load()
    parts = []
    for area, title in areas.items():
        rows = [f"| {rule.id} | {rule.text} | {' '.join(rule.basis)} |" for rule in rules if rule.area == area]
        parts.append("\n".join([f"### {title}", "", "| id | sentence | from |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
