"""The versions of SGLang that this adapter was tested with; found without importing SGLang."""

from __future__ import annotations

from importlib import metadata

from kvx.core.errors import ConfigError

TESTED = "0.5.23"


def installed_version() -> str | None:
    """SGLang's version in this environment; None: it is not installed."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def check_version(allow_untested: bool, version: str | None = None) -> None:
    """Raises ConfigError where `version` (by default the installed one) is not the tested one."""
    version = version or installed_version() or "of unknown version"
    if not allow_untested and version != TESTED:
        raise ConfigError(
            f"SGLang {version} was not tested with this kvx, which is made for {TESTED}: "
            "install the tested version, or set the option allow_untested_engine"
        )
