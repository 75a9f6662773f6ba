"""What every test gets: no option of this shell, and no way to hang."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_options_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVX_") and name != "KVX_VENVS"]:
        monkeypatch.delenv(name)
