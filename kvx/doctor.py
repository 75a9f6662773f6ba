"""`kvx doctor`: what of kvx works in this environment, and what to do about the rest.

Each check tells what it found, and where it is not good what to do. An engine that is not
installed is no fault: engines live in environments of their own.
"""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from kvx import __file__ as kvx_file
from kvx import __version__
from kvx.checks import Check
from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx.plugins import Plugins
from kvx.sockets import try_to_listen
from kvx.tested import is_tested

MIN_OPEN_FILES = 4096
"""An engine, its HTTP clients and kvx's control and data connections share this limit."""
_BASE = ("attrs", "msgspec", "numpy", "pluggy")
_ISA = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")


def examine(plugins: Plugins) -> list[Check]:
    """All checks, in the order in which they build on one another."""
    return [
        _python(),
        Check("kvx", True, f"{__version__} in {Path(kvx_file).parent}"),
        *_base(),
        *_plugins(plugins),
        *_engines(plugins),
        _router(),
        *_options(plugins),
        _open_files(),
        _cpu(),
    ]


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check("python", good, platform.python_version(), "" if good else "use Python 3.11 or newer")


def _base() -> Iterator[Check]:
    for name in _BASE:
        try:
            yield Check(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, False, "not installed", f"pip install {name}")


def _plugins(plugins: Plugins) -> Iterator[Check]:
    transports = sorted(plugins.transports())
    for name in plugins.names:
        yield Check(f"plugin {name}", True, "loaded")
    for name, error in sorted(plugins.broken.items()):
        yield Check(f"plugin {name}", False, str(error), "reinstall or remove the distribution that brings it")
    none = "reinstall kvx, which brings tcp"
    yield Check("transports", bool(transports), ", ".join(transports) or "none", "" if transports else none)


def _engines(plugins: Plugins) -> Iterator[Check]:
    for name, driver in sorted(plugins.drivers().items()):
        version = driver.installed()
        if version is None:
            yield Check(f"engine {name}", True, f"not installed in this environment (tested: {driver.tested})")
        elif is_tested(version, driver.tested):
            yield Check(f"engine {name}", True, f"{version} (tested: {driver.tested})")
        else:
            fix = f"install {name} {driver.tested}, or set allow_untested_engine = true"
            yield Check(f"engine {name}", False, f"{version} was not tested with kvx", fix)


def _router() -> Check:
    try:
        return Check("router", True, f"aiohttp {importlib.metadata.version('aiohttp')}")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "router", True, "not installed in this environment: pip install 'kvx[router]' for demo, up, router"
        )


def _options(plugins: Plugins) -> Iterator[Check]:
    try:
        options = Options.load()
    except ConfigError as error:
        yield Check("options", False, str(error), "correct the KVX_ variables or the file that KVX_CONFIG names")
        return
    yield from plugins.checks(options.sections)
    yield Check("options", True, f"listen {options.listen}, advertise {options.advertise}")
    for name in options.transports:
        if ":" not in name and name not in plugins.transports():
            yield Check(
                f"transport {name}", False, "in option transports, and no plugin has it", "see the plugins above"
            )
    yield _secret(options)
    yield _port(options.listen)


def _secret(options: Options) -> Check:
    if options.secret_file and Path(options.secret_file).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Check("secret", False, f"others can read {options.secret_file}", f"chmod 600 {options.secret_file}")
    if options.secret:
        return Check("secret", True, "set")
    return Check("secret", True, "none: kvx listens and connects on loopback only, unless insecure = true")


def _port(listen: str) -> Check:
    try:
        try_to_listen(listen)
    except OSError as error:
        fix = "set listen to a free port of this machine, or stop what uses it"
        return Check("port", False, f"{listen} cannot be listened on: {error.strerror}", fix)
    return Check("port", True, f"{listen} is free")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Check("open files", True, f"limit {soft}")
    return Check("open files", False, f"limit {soft}, the hard limit is {hard}", f"ulimit -n {MIN_OPEN_FILES}")


def _cpu() -> Check:
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    found = [name for name in _ISA if name in words]
    return Check("cpu", True, f"{platform.machine()}: {', '.join(found) or 'no known vector extension'}")
