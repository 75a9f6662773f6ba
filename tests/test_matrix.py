"""The matrix: its rows name tests that exist, its records say no more than was shown, and its page is what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 100
"""Of a command that takes a few seconds on an idle machine."""
pytestmark = pytest.mark.timeout(4 * LIMIT_S)
ROW = {"what": "", "engine": "", "transport": "tcp", "layout": "", "mode": "push"}


def _load() -> ModuleType:
    loader = SourceFileLoader("kvx_matrix", str(ROOT / ".ci/matrix"))
    spec = importlib.util.spec_from_loader("kvx_matrix", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvx_matrix"] = module  # attrs looks a class's module up
    loader.exec_module(module)
    return module


matrix = _load()
ROWS: dict[str, Any] = matrix.load()
RECORDS = sorted(matrix.RECORDS.glob("*.json"))


# ------------------------------------------------------------------ this tree's rows, records and page


def test_each_row_is_answered_by_tests_or_says_why_not() -> None:
    for row in ROWS.values():
        assert re.fullmatch(r"[a-z0-9-]+", row.id)
        assert row.engine in matrix.SECTIONS, row.id
        if row.lacks:
            assert (row.shows, row.environment, row.module, row.tests) == ("", "", "", ()), row.id
        else:
            assert row.shows in matrix.GOOD, row.id
            assert row.environment in matrix.ENVIRONMENTS, row.id
            assert row.tests, row.id
            assert all((ROOT / path).exists() for path in row.starts), row.id


def test_the_named_tests_exist() -> None:
    named = {test for row in ROWS.values() for test in row.test_ids()}
    words = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(named))
    done = subprocess.run(
        (sys.executable, *words), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = set(done.stdout.splitlines())
    assert [test for test in named if not any(one == test or one.startswith(f"{test}[") for one in collected)] == []


def test_each_environment_and_folder_is_there() -> None:
    for environment in matrix.ENVIRONMENTS.values():
        assert (ROOT / f"requirements/{environment.lock}.txt").exists()
    assert all((ROOT / folder).is_dir() for folder in matrix.FOLDERS.values())


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.id)
def test_a_row_depends_on_its_tests_its_adapter_its_transport_and_the_core(row: Any) -> None:
    found = {str(path.relative_to(ROOT)) for path in matrix.sources(row)}
    if row.lacks:
        assert not found
        return
    assert {row.module, "tests/conftest.py", "kvx/core/model.py"} <= found
    for name in {row.engine, row.transport} & set(matrix.FOLDERS):
        assert {path for path in found if path.startswith(matrix.FOLDERS[name] + "/")}
    if row.shows == "run":
        assert "kvx/core/endpoint.py" in found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_no_more_than_its_tests_have_shown(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["schema"] == "kvx.matrix/1"
    assert record["row"] == path.stem
    row, results = ROWS[path.stem], set(record["tests"].values())
    assert record["verdict"] in {row.shows, matrix.SKIPPED, matrix.FAILED}
    if record["verdict"] in matrix.GOOD:
        assert results == {"passed"}
        assert record["release"]
    else:
        assert record["reason"]
    assert bool(record["refusals"]) == (record["verdict"] == "refused")
    if matrix.is_fresh(row, record, matrix.digest(row)) and row.tests:
        assert matrix.judge(row, {test.partition("::")[2]: ended(result) for test, result in record["tests"].items()})


def test_the_page_is_what_the_records_say() -> None:
    assert (matrix.RECORDS / "README.md").read_text() == matrix.table(ROWS.values()), "run .ci/matrix --table"


# ------------------------------------------------------------------ what a row depends on


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with this one's folders, a row for each kind of end, and this environment."""
    text = {
        "kvx/__init__.py": "",
        "kvx/core/__init__.py": "",
        "kvx/core/model.py": "",
        "kvx/core/deep.py": "from kvx.core.model import Mode",
        "kvx/other.py": "",
        "kvx/started.py": "",
        "transports/kvx_tcp/plugin.py": "def later():\n    from kvx.core import deep",
        "adapters/kvx_vllm/compat.py": "",
        "requirements/dev.txt": "",
        "tests/conftest.py": "",
        "tests/helper.py": "",
        "tests/test_it.py": "",
    }
    for name, content in text.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


CASES = {
    "tests/test_it.py": True,
    "tests/conftest.py": True,
    "adapters/kvx_vllm/compat.py": True,
    "transports/kvx_tcp/plugin.py": True,
    "kvx/core/deep.py": True,
    "kvx/core/model.py": True,
    "kvx/core/__init__.py": True,
    "kvx/started.py": True,
    "requirements/dev.txt": True,
    "kvx/other.py": False,
    "tests/helper.py": False,
}


@pytest.mark.parametrize(("changed", "is_stale"), CASES.items(), ids=CASES)
def test_a_row_is_stale_when_what_it_depends_on_has_changed(tree: Path, changed: str, *, is_stale: bool) -> None:
    fields = {**ROW, "engine": "vllm", "environment": "dev", "module": "tests/test_it.py", "starts": ["kvx/started.py"]}
    row = matrix.Row("a", shows="run", tests=["test_a"], **fields)
    record = {"digest": matrix.digest(row, tree), "verdict": "run"}
    assert matrix.is_fresh(row, record, matrix.digest(row, tree))
    path = tree / changed
    path.write_text(path.read_text() + "\n# changed\n")
    matrix.imports.cache_clear()
    assert matrix.is_fresh(row, record, matrix.digest(row, tree)) is not is_stale


def test_a_row_that_is_declared_otherwise_is_stale_and_so_is_one_that_failed(tree: Path) -> None:
    fields = {**ROW, "environment": "dev", "module": "tests/test_it.py", "shows": "run"}
    one, more = (matrix.Row("a", tests=tests, **fields) for tests in (["test_a"], ["test_a", "test_b"]))
    now = matrix.digest(one, tree)
    assert not matrix.is_fresh(more, {"digest": now, "verdict": "run"}, matrix.digest(more, tree))
    assert not matrix.is_fresh(one, {"digest": now, "verdict": "failed"}, now)
    assert not matrix.is_fresh(one, {"digest": now, "verdict": "not run here"}, now)
    assert not matrix.is_fresh(one, None, now)


# ------------------------------------------------------------------ verdicts


def ended(result: str, *refusals: str) -> Any:
    return matrix.Ended(result, "" if result == "passed" else f"it is {result}", refusals, 1.0)


@pytest.mark.parametrize(
    ("shows", "tests", "verdict", "reason"),
    [
        ("run", {"test_a[1]": ended("passed"), "test_a[2]": ended("passed"), "test_b": ended("passed")}, "run", ""),
        ("driven", {"test_a": ended("passed"), "test_b": ended("passed")}, "driven", ""),
        ("run", {"test_a": ended("skipped"), "test_b": ended("passed")}, "not run here", "it is skipped"),
        ("run", {"test_a": ended("skipped"), "test_b": ended("failed")}, "failed", "it is failed"),
        ("refused", {"test_a": ended("passed", "no"), "test_b": ended("passed", "no")}, "refused", ""),
        ("refused", {"test_a": ended("passed"), "test_b": ended("passed")}, "failed", "its tests have recorded no"),
    ],
)
def test_verdicts(shows: str, tests: dict[str, Any], verdict: str, reason: str) -> None:
    row = matrix.Row("a", shows=shows, environment="dev", module="m.py", tests=["test_a", "test_b"], **ROW)
    found = matrix.judge(row, {**tests, "test_abc": ended("failed")})
    assert (found["verdict"], found["reason"][: len(reason) or 1]) == (verdict, reason)
    assert set(found["tests"]) == {f"m.py::{name}" for name in tests}
    assert found["refusals"] == (["no"] if verdict == "refused" else [])


def test_a_row_one_of_whose_tests_has_not_ended_has_no_verdict() -> None:
    row = matrix.Row("a", shows="run", environment="dev", module="m.py", tests=["test_a", "test_b"], **ROW)
    assert matrix.judge(row, {"test_a": ended("passed")}) is None


# ------------------------------------------------------------------ the command, in a tree of its own

TESTS = """
import os, time
from pathlib import Path

import pytest


def test_good(): pass
def test_refusing(record_property): record_property("refusal", "no, | thank you")
def test_bad(): raise ValueError("that is how /tmp/it is, by and/or by")
def test_elsewhere(): pytest.skip("no such device")


@pytest.fixture
def broken():
    yield
    raise RuntimeError("servers did not stop")


def test_unclean(broken): pass


def test_long():
    Path("started").touch()
    until = time.monotonic() + 50
    while not Path("may-end").exists() and time.monotonic() < until:
        time.sleep(0.02)
"""
DECLARED = """
[[group]]
engine = ""
transport = "tcp"
environment = "dev"
module = "tests/test_it.py"
shows = "run"
rows = [
    { id = "good", what = "", layout = "", mode = "push", tests = ["test_good"] },
    { id = "bad", what = "", layout = "", mode = "push", tests = ["test_good", "test_bad"] },
    { id = "elsewhere", what = "", layout = "", mode = "push", tests = ["test_elsewhere"] },
    { id = "unclean", what = "", layout = "", mode = "push", tests = ["test_unclean"] },
    { id = "long", what = "", layout = "", mode = "push", tests = ["test_good", "test_long"] },
]

[[group]]
engine = ""
transport = "tcp"
environment = "dev"
module = "tests/test_it.py"
shows = "refused"
rows = [{ id = "refusing", what = "", layout = "", mode = "push", tests = ["test_refusing"] }]

[[group]]
engine = ""
transport = "tcp"
rows = [{ id = "nowhere", what = "", layout = "", mode = "push", lacks = "a device" }]
"""


@pytest.fixture
def command(tree: Path) -> Callable[..., subprocess.Popen[str]]:
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/matrix", tree / ".ci/matrix")
    (tree / ".ci/matrix.toml").write_text(DECLARED)
    (tree / "tests/test_it.py").write_text(TESTS)
    shutil.rmtree(tree / "kvx")  # this environment's own is used
    (tree / ".venv").symlink_to(sys.prefix)

    def start(*words: str) -> subprocess.Popen[str]:
        command = (sys.executable, str(tree / ".ci/matrix"), *words)
        return subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def record(tree: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tree / f"docs/matrix/{name}.json").read_text())
    return found


def test_each_row_gets_the_record_that_its_tests_deserve(tree: Path, command: Any) -> None:
    names = ("good", "bad", "elsewhere", "unclean", "refusing", "nowhere")
    run = command(*names)
    told, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, told
    verdicts = {name: (record(tree, name)["verdict"], record(tree, name)["reason"]) for name in names}
    assert verdicts == {
        "good": ("run", ""),
        "bad": ("failed", "ValueError: that is how (a path) is, by and/or by"),
        "elsewhere": ("not run here", "no such device"),
        "unclean": ("failed", 'failed on teardown with "RuntimeError: servers did not stop"'),
        "refusing": ("refused", ""),
        "nowhere": ("not run here", "a device"),
    }
    assert record(tree, "good")["tests"] == {"tests/test_it.py::test_good": "passed"}
    assert record(tree, "good")["release"].startswith("kvx ")
    assert record(tree, "refusing")["refusals"] == ["no, | thank you"]
    page = (tree / "docs/matrix/README.md").read_text()
    assert "| long |  |  | tcp | push | not yet run | | |" in page
    assert r"refused: no, \| thank you" in page

    stale = command("--stale")
    told, _ = stale.communicate(timeout=LIMIT_S)
    assert stale.returncode == 0
    assert [line.partition(":")[0] for line in told.splitlines()[1:]] == ["bad", "elsewhere", "unclean", "long"]


def test_an_interrupted_run_keeps_what_is_done_and_goes_on_from_there(tree: Path, command: Any) -> None:
    run = command("good", "long")
    until = time.monotonic() + LIMIT_S
    while not (tree / "started").exists() and time.monotonic() < until:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    told, _ = run.communicate(timeout=LIMIT_S)
    assert (run.returncode, "long: did not come to its end" in told) == (1, True), told
    assert record(tree, "good")["verdict"] == "run"
    assert not (tree / "docs/matrix/long.json").exists()

    (tree / "may-end").touch()
    again = command("good", "long")
    told, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, told
    assert "1 of 2 rows are fresh" in told
    assert record(tree, "long")["verdict"] == "run"


def test_a_row_that_is_not_there_is_refused(command: Any) -> None:
    run = command("nobody")
    told, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 2
    assert "no row nobody" in told
