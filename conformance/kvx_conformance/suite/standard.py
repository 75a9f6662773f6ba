"""The standard list of cases, and the guard: no case of it may be missing or replaced without a reason.

`python -m kvx_conformance.suite.standard --write` renews the list from the cases; without `--write` it says
whether the list is current.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvx_conformance.suite.case import CASES, Case
from kvx_conformance.suite.runner import SUITE

FILE = Path(__file__).with_name("standard.toml")
VERSION = "1.1"
"""The suite's own version: its first number is that of the protocol, the second rises with each change of the list."""
_FIRST = "1.0"
"""Nobody had this version before its cases, so none of them is provisional."""
_HEAD = """\
# The standard cases of suite {version}: an id stays, and means the same case.
# Made by `python -m kvx_conformance.suite.standard --write`.
"""


def load() -> dict[str, dict[str, str]]:
    """Profile, level and function of each standard case, and the version of the suite that it is in since, by id."""
    content: dict[str, dict[str, str]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return content


def provisional() -> frozenset[str]:
    """The cases that are new in this version: reported, and counted from the next one on."""
    return frozenset(name for name, facts in load().items() if facts["since"] == VERSION != _FIRST)


def versions() -> str:
    """The suite's versions and what each has brought, as Markdown."""
    since = [facts["since"] for facts in load().values()]
    rows = []
    for version in sorted({*since, VERSION}, key=lambda text: [int(part) for part in text.split(".")]):
        major, _, minor = version.partition(".")
        counted = version if version == _FIRST else f"{major}.{int(minor) + 1}"
        rows.append(f"| {version} | {major} | {since.count(version)} | {counted} |")
    head = "| suite | protocol | new cases | counted from |"
    return "\n".join([head, "|---|---|---|---|", *rows]) + "\n"


def problems(cases: Mapping[str, Case], exempt: Collection[str] = ()) -> list[str]:
    """What was done to the standard list, one sentence each; cases beside it are nobody's fault."""
    found = []
    for name, expected in load().items():
        if name in exempt:
            continue
        if name not in cases:
            found.append(f"standard case {name} is missing")
            continue
        now = _facts(cases[name])
        if now["function"] != expected["function"]:
            found.append(f"standard case {name} was overridden: {now['function']} instead of {expected['function']}")
        found += [
            f"standard case {name} has changed its {fact}: {now[fact]} instead of {expected[fact]}"
            for fact in ("profile", "level")
            if now[fact] != expected[fact]
        ]
    return found


def table(cases: Mapping[str, Case]) -> str:
    """The text of the list: a case that is not in it yet is new in this version."""
    known = load()
    parts = [_HEAD.format(version=VERSION)]
    for name, case in sorted(cases.items()):
        since = known[name]["since"] if name in known else VERSION
        facts = "\n".join(f'{key} = "{value}"' for key, value in {**_facts(case), "since": since}.items())
        parts.append(f'["{name}"]\n{facts}\n')
    return "\n".join(parts)


def _facts(case: Case) -> dict[str, str]:
    run: Any = case.run.func if isinstance(case.run, partial) else case.run
    function = f"{run.__module__}:{run.__qualname__}"
    return {"profile": case.profile.value, "level": case.level.value, "function": function}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: written, or current; 1: it is not."""
    parser = argparse.ArgumentParser(description="The standard list of the conformance suite's cases.")
    parser.add_argument("--write", action="store_true", help="renew it")
    for module in SUITE:
        importlib.import_module(module)
    text = table(CASES)
    if parser.parse_args(argv).write:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if text == FILE.read_text(encoding="utf-8"):
        return 0
    sys.stderr.write("suite/standard.toml is not current: python -m kvx_conformance.suite.standard --write\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
