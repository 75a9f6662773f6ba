"""The JSON that commands print: one object, with the same fields first (design: commands and outputs)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvx import __version__
from kvx.core.errors import ConfigError


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json [FILE]`: without FILE the object goes to stdout."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON object, or write it to FILE"
    )


def document(command: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kvx COMMAND` behind the common ones: schema, version, host."""
    return {"schema": f"kvx.{command}/1", "kvx": __version__, "host": host(), **fields}


def write(target: str, content: Mapping[str, Any]) -> None:
    """Print the object (`target` is `-`) or write it to a file. Raises ConfigError where it cannot be written."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {target} cannot be written: {error.strerror}") from error


def summary(samples: Sequence[float]) -> dict[str, float]:
    """{min, mean, median, p99, max} of at least one sample, in the samples' unit."""
    values = np.asarray(samples, dtype=np.float64)
    return {
        "min": float(values.min()),
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def host() -> dict[str, Any]:
    """What a figure depends on; nothing that names the machine."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
