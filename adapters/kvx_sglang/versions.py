"""The version of SGLang that this adapter was tested with; found without importing SGLang."""

from __future__ import annotations

from kvx import tested

TESTED = "0.5.23"


def installed_version() -> str | None:
    """SGLang's version in this environment; None: it is not installed."""
    return tested.installed("sglang")


def check_version(allow_untested: bool, version: str | None = None) -> None:
    """Raises ConfigError where `version` (by default the installed one) is not the tested one."""
    tested.check("SGLang", version or installed_version(), TESTED, allow_untested=allow_untested)
