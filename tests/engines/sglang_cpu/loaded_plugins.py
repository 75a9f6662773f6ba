"""A plugin of pytest: SGLang's plugins are loaded, as each of its processes does at its start."""

from __future__ import annotations

from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.plugins import load_plugins

load_plugins()


def pytest_report_header() -> str:
    return f"transfer backends: {' '.join(DISAGG_TRANSFER_BACKEND_CHOICES)}"
