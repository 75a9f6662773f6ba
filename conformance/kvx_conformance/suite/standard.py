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
VERSION = "1.0"
"""The suite's own version: its first number is that of the protocol, the second rises with each change of the list."""
_HEAD = """\
# The standard cases of suite {version}: an id stays, and means the same case.
# Made by `python -m kvx_conformance.suite.standard --write`.
"""


def load() -> dict[str, dict[str, str]]:
    """Profile, level and function of each standard case, by id."""
    content: dict[str, dict[str, str]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return content


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
    """The text of the list."""
    parts = [_HEAD.format(version=VERSION)]
    for name, case in sorted(cases.items()):
        facts = "\n".join(f'{key} = "{value}"' for key, value in _facts(case).items())
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
