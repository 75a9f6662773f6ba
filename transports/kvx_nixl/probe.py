"""Program: make an agent with one backend, and tell as JSON whether that works. `kvx doctor` gives it a time limit."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

from kvx.core.errors import KvxError
from kvx_nixl.agent import Agent
from kvx_nixl.backends import LIBFABRIC, UCX
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions


def probe(name: str, section: dict[str, object]) -> dict[str, object]:
    """Keys: `error` (empty where it works), `seconds`, `libfabric` (the library's path), `version` (libfabric's)."""
    backend, started = {"UCX": UCX, "LIBFABRIC": LIBFABRIC}[name], time.monotonic()
    error = ""
    try:
        # The probe opens no agent to anybody: it may be made before there is a secret.
        options = Options.of({**section, "trusted_network": True})
        backend.prepare(options)
        Agent("kvx-doctor", backend, options, Regions([])).close()
    except (KvxError, ImportError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds, library = time.monotonic() - started, _mapped("libfabric.so")
    return {"error": error, "seconds": seconds, "libfabric": library, "version": _version(library)}


def _mapped(name: str) -> str:
    """Path of a shared library of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith(name):
            return path[0]
    return ""


def _version(library: str) -> str:
    if not library:
        return ""
    number = int(ctypes.CDLL(library).fi_version())
    return f"{number >> 16}.{number & 0xFFFF}"


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], json.loads(sys.argv[2]))))  # noqa: T201 - the program's one answer
