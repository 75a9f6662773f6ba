"""Which releases of an engine an adapter was tested with, as one pattern of file names, such as `0.32.*`."""

from __future__ import annotations

import importlib.metadata
from fnmatch import fnmatchcase

from kvx.core.errors import ConfigError


def is_tested(version: str, pattern: str) -> bool:
    return fnmatchcase(version, pattern)


def installed(*distributions: str) -> str | None:
    """The version of the first of these that is in this environment, without importing it; None: none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check(engine: str, version: str | None, pattern: str, *, allow_untested: bool) -> None:
    """Raises ConfigError where this version (None: of an unknown one) was not tested and nobody allows it."""
    if allow_untested or (version is not None and is_tested(version, pattern)):
        return
    raise ConfigError(
        f"{engine} {version or 'of unknown version'} was not tested with this kvx, which is made for {pattern}: "
        "install a tested version, or set the option allow_untested_engine"
    )
