"""Two packages that know kvx from its docs alone: small, installed apart, sound, and found out when they are not."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KVX = Path(sys.executable).with_name("kvx")
PUBLIC = {
    "samehost": {
        "kvx.core.errors",
        "kvx.core.events",
        "kvx.core.model",
        "kvx.hookspecs",
        "kvx.memory",
        "kvx.transport",
    },
    "abacus_kvx": {
        *(
            "kvx.config",
            "kvx.core.events",
            "kvx.core.model",
            "kvx.dialect",
            "kvx.driver",
            "kvx.engine",
            "kvx.hookspecs",
        ),
        *("kvx.instance", "kvx.params", "kvx.used"),
    },
    "abacus": set(),
}
"""What each may import of kvx; the made-up engine does not know it."""
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
NEEDS_S = 900
DEMO = ("demo", "--engine", "abacus", "--transport", "samehost", "--mode", "push", "--requests", "4", "--json")


def install(into: Path, *names: str) -> Path:
    """Install examples as anybody would, without a network, into a folder of their own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(into), *(str(EXAMPLES / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return into


def kvx(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [KVX, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=NEEDS_S - 60, check=False
    )


def conformance(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    done = kvx(folder, "conformance", "run", *arguments, "--pace", "3", "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def outsiders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("outsiders"), "samehost", "abacus")


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = (range(one.start[0], one.end[0] + 1) for one in tokens if one.type not in SKIPPED and one.string)
    return len({line for lines in held for line in lines} - texts)


def test_the_transport_is_small() -> None:
    assert code_lines(EXAMPLES / "samehost/samehost/transport.py") < 200


def test_the_adapter_is_small() -> None:
    assert len((EXAMPLES / "abacus/abacus_kvx/adapter.py").read_text(encoding="utf-8").splitlines()) < 300


@pytest.mark.parametrize("package", PUBLIC)
def test_they_use_what_the_docs_name(package: str) -> None:
    (folder,) = EXAMPLES.glob(f"*/{package}")
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name for name in names if re.match(r"kvx($|[._])", name)}
    assert found == PUBLIC[package]


@pytest.mark.slow
@pytest.mark.timeout(NEEDS_S)
def test_the_transport_has_a_passing_report(outsiders: Path) -> None:
    status, report = conformance(outsiders, "--transport", "samehost")
    assert status == 0, [one for one in report["cases"] if one["verdict"] not in ("pass", "skip_undeclared")]
    assert report["holds"]
    assert not report["partial"]
    assert (report["verdicts"]["fail"], report["verdicts"]["error"]) == (0, 0)
    assert report["verdicts"]["pass"] >= 140
    assert report["declared"]["ops"] == ["write"]
    assert report["target"]["transport"] == "samehost"


@pytest.mark.slow
@pytest.mark.timeout(NEEDS_S)
def test_the_adapter_has_a_passing_report(outsiders: Path) -> None:
    status, report = conformance(outsiders, "--adapter", "abacus")
    assert status == 0, [one for one in report["cases"] if one["verdict"] != "pass"]
    assert report["holds"]
    assert not report["partial"]
    verdicts = {one["id"]: one["verdict"] for one in report["cases"]}
    undeclared = {name for name, verdict in verdicts.items() if verdict == "skip_undeclared"}
    assert {name.partition(".")[0] for name in undeclared} == {"KVX-ADP-009", "KVX-ADP-010"}
    assert all(verdict == "pass" for name, verdict in verdicts.items() if name not in undeclared)
    assert len(verdicts.keys() - undeclared) >= 21


@pytest.mark.slow
@pytest.mark.timeout(NEEDS_S)
def test_one_outsider_moves_the_cache_of_the_other(outsiders: Path) -> None:
    done = kvx(
        outsiders,
        *DEMO,
    )
    assert done.returncode == 0, done.stderr
    (mode,) = json.loads(done.stdout)["modes"]
    assert (mode["tokens_equal"], mode["transfers_ok"], mode["requests"]) == (4, 4, 4)
    assert mode["control_tokens_equal"] < 4
    assert mode["bytes"] > 0


@pytest.mark.slow
@pytest.mark.timeout(NEEDS_S)
def test_unlike_engines_refuse_one_another_and_compute_by_themselves(outsiders: Path, tmp_path: Path) -> None:
    file = tmp_path / "interop.json"
    done = kvx(outsiders, "conformance", "interop", "reference", "abacus", "--json", str(file))
    assert done.returncode == 0, done.stderr
    pairs = json.loads(file.read_text())["pairs"]
    assert len(pairs) == 8
    for pair in pairs:
        like = pair["producer"] == pair["consumer"]
        found = (pair["verdict"], pair["reason"], pair["tokens_equal"])
        assert found == (("joined", "", True) if like else ("refused", "layout", True)), pair
        assert like or "variant: " in pair["detail"], pair


BROKEN = {
    "samehost goes on after forbid": (
        "samehost/transport.py",
        "if not self._permitted(word, starts, ends):\n                            raise",
        "if False:\n                            raise",
        ("--transport", "samehost"),
        "KVX-TRN-015.midway-write",
    ),
    "samehost tells the end of what it has not fetched": (
        "samehost/transport.py",
        "                    if left <= 0:\n",
        "                    if left <= 0:\n                        yield Fetched(word.op_id)\n",
        ("--transport", "samehost"),
        "KVX-TRN-004.whole-region-write",
    ),
    "abacus hands over the right blocks for the wrong place": (
        "abacus_kvx/adapter.py",
        "part = Part(None, (send.staged,), table)",
        "part = Part(None, (0,), table)",
        ("--adapter", "abacus", "--jobs", "1"),
        "KVX-ADP-001.tokens-push",
    ),
    "abacus gives blocks back at the end of their request": (
        "abacus_kvx/adapter.py",
        'self._put(Abort(load.id, Reason.ABORTED, "", load.ticket, load.address))',
        'self._put(Abort(load.id, Reason.ABORTED, "", load.ticket, load.address)); self._pool.drop(load.kept)',
        ("--adapter", "abacus", "--jobs", "1"),
        "KVX-ADP-008.late-write",
    ),
    "abacus keeps blocks that kvx has released": (
        "abacus_kvx/adapter.py",
        "self._pool.drop(transfer.kept)",
        "pass",
        ("--adapter", "abacus", "--jobs", "1"),
        "KVX-ADP-006.mixed-push",
    ),
    "abacus takes a load that has failed for a good one": (
        "abacus_kvx/adapter.py",
        "return [(transfer.request, outcome.ok)]",
        "return [(transfer.request, True)]",
        ("--adapter", "abacus", "--jobs", "1"),
        "KVX-ADP-003.prefill-killed-push",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(NEEDS_S)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_edit_is_found(name: str, tmp_path: Path) -> None:
    file, old, new, arguments, case = BROKEN[name]
    folder = install(tmp_path, file.partition("/")[0].partition("_")[0])
    path = folder / file
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), encoding="utf-8")
    status, report = conformance(folder, *arguments, "--only", case)
    assert status == 1
    assert [(one["id"], one["verdict"]) for one in report["cases"]] == [(case, "fail")]
