"""What `kvx doctor` finds of NIXL, libfabric and EFA on this host."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvx.checks import Check
from kvx_nixl import efa

_PROBE_S = 30.0
_SYMBOLS = re.compile(rb"FABRIC_1\.(\d{1,3})")
_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")
_VERBS = Path("/sys/class/infiniband")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def examine(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """All checks. Where NIXL is not installed this is one line, and no fault."""
    version = _nixl()
    if version is None:
        yield Check("nixl", True, "not installed in this environment: pip install 'kvx[nixl]'")
        return
    yield Check("nixl", True, version)
    yield _backend("UCX", sections.get("nixl-ucx", {}))[0]
    found, answer = _backend("LIBFABRIC", sections.get("nixl-libfabric", {}))
    yield found
    yield _libfabric(answer, sections.get("nixl-libfabric", {}))
    yield _providers()
    yield _devices()
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _verbs())


def _nixl() -> str | None:
    found = []
    for name in ("nixl", *_DISTRIBUTIONS):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or None


def _backend(name: str, section: Mapping[str, Any]) -> tuple[Check, dict[str, Any]]:
    """Does it really load? NIXL lists plugins by their files, whether they load or not."""
    command = [sys.executable, "-m", "kvx_nixl.probe", name, json.dumps(dict(section))]
    label, answer = f"nixl {name}", {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_S, check=False)  # noqa: S603 - our own program
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check(
            label, False, f"has not started within {_PROBE_S:g} s", "see its log with NIXL_LOG_LEVEL=DEBUG"
        ), {}
    except (OSError, ValueError, IndexError):
        text = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Check(label, False, f"has crashed: {text[0]}", "reinstall nixl"), {}
    if answer["error"]:
        optional = name == "LIBFABRIC" and not section and not efa.devices()
        fix = "" if optional else "see the lines below, and NIXL_LOG_LEVEL=INFO kvx doctor"
        return Check(label, optional, f"does not load: {answer['error']}", fix), answer
    return Check(label, True, f"loads, in {answer['seconds']:.1f} s"), answer


def _libfabric(answer: Mapping[str, Any], section: Mapping[str, Any]) -> Check:
    """The symbol version that the plugin wants against the one that the library has."""
    plugin, library = _plugin(), _library(answer, section)
    wanted = None if plugin is None else symbol_version(plugin.read_bytes())
    if library is None:
        text = "not found" if wanted is None else f"not found; the plugin wants FABRIC_1.{wanted}"
        need = bool(efa.devices())
        return Check("libfabric", not need, text, "install the EFA driver's libfabric, or set preload" if need else "")
    has = symbol_version(library.read_bytes())
    text = f"{answer.get('version') or 'unknown version'} in {library}, symbols up to FABRIC_1.{has}"
    if wanted is None or (has is not None and has >= wanted):
        return Check("libfabric", True, f"{text}; the plugin wants FABRIC_1.{wanted}")
    fix = f"install a libfabric with FABRIC_1.{wanted}, or nixl 1.5.0, whose plugin wants FABRIC_1.7"
    return Check("libfabric", False, f"{text}, and the plugin wants FABRIC_1.{wanted}", fix)


def symbol_version(data: bytes) -> int | None:
    """Minor number of the newest FABRIC_1.N that an ELF file defines or wants."""
    return max((int(number) for number in _SYMBOLS.findall(data)), default=None)


def _plugin() -> Path | None:
    for name in _DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if file.name == "libplugin_LIBFABRIC.so" and path.exists():
                return path
    return None


def _library(answer: Mapping[str, Any], section: Mapping[str, Any]) -> Path | None:
    named = [path for path in section.get("preload", []) if Path(path).name.startswith("libfabric.so")]
    for path in (answer.get("libfabric"), *named, _installed()):
        if path and Path(path).is_file():
            return Path(path)
    return None


def _installed() -> str | None:
    soname = ctypes.util.find_library("fabric")
    folders = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
    return next((f"{folder}/{soname}" for folder in folders if soname and Path(folder, soname).exists()), None)


def _providers() -> Check:
    program = shutil.which("fi_info", path="/opt/amazon/efa/bin:/usr/bin:/usr/local/bin")
    if program is None:
        return Check("libfabric providers", True, "unknown: there is no fi_info here")
    try:
        done = subprocess.run([program, "-l"], capture_output=True, timeout=_PROBE_S, check=False, text=True)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("libfabric providers", False, f"fi_info: {error}", "reinstall libfabric")
    names = [line.rstrip(":") for line in done.stdout.splitlines() if line.endswith(":")]
    return providers(names, efa.devices())


def providers(names: list[str], devices: list[str]) -> Check:
    """Where there are EFA devices, libfabric has to have the provider for them."""
    detail = ", ".join(names) or "none"
    if devices and "efa" not in names:
        return Check("libfabric providers", False, detail, "install the EFA driver's libfabric: this one has no efa")
    return Check("libfabric providers", True, detail)


def _devices() -> Check:
    found = efa.devices()
    if not found:
        return Check("efa", True, "no EFA device on this host")
    driver, pages = _text(Path("/sys/module/efa/version")), _text(_HUGE_PAGES)
    detail = (
        f"{len(found)} devices ({', '.join(found)}), driver {driver or 'unknown'}, {pages or '0'} huge pages of 2 MiB"
    )
    return Check("efa", True, detail)


def _verbs() -> bool:
    try:
        return any(_VERBS.iterdir())
    except OSError:
        return False


def locked_memory(limit: int, verbs: bool) -> Check:
    """Registered memory is locked memory: with an RDMA device the limit has to leave room for the whole cache."""
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", True, "unlimited")
    text = f"limit {limit // 1024} KiB"
    if not verbs:
        return Check("locked memory", True, f"{text}; there is no RDMA device")
    fix = "ulimit -l unlimited (limits.conf memlock, LimitMEMLOCK=infinity, docker --ulimit memlock=-1)"
    return Check("locked memory", False, text, fix)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
