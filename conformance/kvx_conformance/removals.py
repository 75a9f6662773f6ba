"""The mutants: for each rule at least one edit of the source without which a named test must fail."""

from __future__ import annotations

import tomllib
from pathlib import Path

from attrs import frozen

FILE = Path(__file__).with_name("removals.toml")


@frozen
class Mutant:
    """One edit: `removes` says in a few words what is gone; `old` stands exactly once in `file`."""

    rule: str
    removes: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = tuple(Mutant(**entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["removals"])
