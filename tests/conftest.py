"""What every test gets: no option of this shell, no way to hang, and a place for its raw figures."""

from __future__ import annotations

import datetime as dt
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvx import report

KEPT = {"KVX_VENVS", "KVX_ALLOW_UNTESTED_ENGINE"}
"""What a run may set: where environments are, and that its engine is another one than kvx is made for."""


def pytest_configure() -> None:
    """A shell has SIGINT ignored in what it starts with `&`, and children inherit that; a handler they do not inherit,
    so that a Ctrl-C which a test sends to what it has started arrives.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--evidence", metavar="DIR", help="write what tests measured to DIR/NAME.json (docs/evidence is kept in git)"
    )


@pytest.fixture(autouse=True)
def _no_options_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVX_") and name not in KEPT]:
        monkeypatch.delenv(name)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, Any]], None]:
    """`evidence(name, fields)` prints what a test measured and, with --evidence, keeps it as JSON."""
    folder = request.config.getoption("--evidence")

    def keep(name: str, fields: Mapping[str, Any]) -> None:
        today = dt.datetime.now(tz=dt.UTC).date().isoformat()
        content = report.document("evidence", {"name": name, "test": request.node.nodeid, "date": today, **fields})
        print(f"{name}: {dict(fields)}")
        if folder:
            report.write(str(Path(folder) / f"{name}.json"), content)

    return keep
