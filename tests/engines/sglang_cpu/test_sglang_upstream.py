"""SGLang's own unit tests of disaggregation, unmodified, with kvx's plugin and without."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

SUBJECT = "sglang.srt.disaggregation"
UPSTREAM = os.environ.get("UPSTREAM_TESTS", "")
"""A folder of SGLang's unit tests of that package: they are in its repository and not in its wheel."""


def released() -> dict[str, str]:
    """The wheel's test files that name the package, and their digests: tests of running servers, which want a GPU."""
    found = [file for file in files("sglang") or [] if file.name.startswith("test_") and file.suffix == ".py"]
    named = [file for file in found if any(word in file.read_text(encoding="utf-8") for word in (SUBJECT, "PDDisagg"))]
    return {str(file): sha256(file.read_binary()) for file in named}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def run(tests: list[Path], plugins: str, folder: Path) -> tuple[dict[str, str], str]:
    """Test to its result, and what pytest said. No configuration of ours is in force."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    junit = folder / f"{plugins}.xml"
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "SGLANG_PLUGINS": plugins, "SGLANG_USE_CPU_ENGINE": "1"}
    options = ("-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", "-p", "loaded_plugins")
    command = (sys.executable, "-m", "pytest", *options, "--junitxml", str(junit), *map(str, tests))
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert junit.exists(), done.stdout + done.stderr
    cases = ET.parse(junit).iter("testcase")  # noqa: S314
    results = {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        for case in cases
    }
    return results, done.stdout


def backends(told: str) -> list[str]:
    return told.partition("transfer backends: ")[2].partition("\n")[0].split()


@pytest.mark.skipif(not UPSTREAM, reason="UPSTREAM_TESTS names no folder with SGLang's files")
def test_sglangs_unit_tests_end_as_without_the_plugin(tmp_path: Path, keep: Any) -> None:
    tests = sorted(Path(UPSTREAM).glob("test_*.py"))
    with_kvx, told = run(tests, "kvx", tmp_path)
    without, told_without = run(tests, "none", tmp_path)
    keep(
        "sglang_upstream_units",
        {
            "sglang": version("sglang"),
            "in the wheel": released(),
            "run": {path.name: sha256(path.read_bytes()) for path in tests},
            "with kvx": Counter(with_kvx.values()),
            "without": Counter(without.values()),
        },
    )
    assert ("kvx" in backends(told), "kvx" in backends(told_without)) == (True, False)
    assert with_kvx == without
    assert "passed" in with_kvx.values()
