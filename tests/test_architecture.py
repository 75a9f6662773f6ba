"""What the tree promises: who imports whom, what is never imported, what a wheel holds."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [
    ROOT / "kvx",
    ROOT / "transports/kvx_tcp",
    ROOT / "transports/kvx_nixl",
    ROOT / "adapters/kvx_reference",
    ROOT / "adapters/kvx_sglang",
    ROOT / "adapters/kvx_vllm",
    ROOT / "conformance/kvx_conformance",
]
IO = {
    *("socket", "selectors", "ssl", "threading", "queue", "asyncio", "multiprocessing", "subprocess"),
    *("time", "random", "logging", "os", "pickle", "pluggy", "torch"),
}
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
PURE = {"kvx", "kvx.core.errors", "kvx.core.events", "kvx.core.model"}
ADAPTER = PURE | {
    *("kvx.core.layout", "kvx.engine", "kvx.driver", "kvx.dialect", "kvx.instance", "kvx.config", "kvx.tracing"),
    *("kvx.hookspecs", "kvx.address", "kvx.params", "kvx.used", "kvx.drift", "kvx.tested"),
}
BENCH = {"kvx.bench.cache", "kvx.bench.callbacks"}
"""What a driver implements so that `kvx bench callbacks` can drive its adapter; nothing else of an adapter sees it."""
ALLOWED = {
    "kvx_tcp": PURE | {"kvx.transport", "kvx.hookspecs", "kvx.memory"},
    "kvx_nixl": PURE | {"kvx.transport", "kvx.hookspecs", "kvx.checks"},
    "kvx_reference": ADAPTER,
    "kvx_sglang": ADAPTER,
    "kvx_vllm": ADAPTER,
}


def sources(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(module: ast.AST) -> Iterator[str]:
    """Absolute names of imported modules, wherever the statement stands; `from a import b` gives a and a.b."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.is_dir() or base.with_suffix(".py").is_file()


def test_the_core_does_no_io_and_has_no_clock_and_no_randomness() -> None:
    seen = set()
    for path, module in sources(ROOT / "kvx/core"):
        for name in imports(module):
            seen.add(name)
            assert name.partition(".")[0] not in IO, f"{path} imports {name}"
    assert "kvx.core.model" in seen


def test_nothing_unpickles_or_evaluates() -> None:
    for folder in PACKAGES:
        for path, module in sources(folder):
            assert not {name.partition(".")[0] for name in imports(module)} & FORBIDDEN, path
            calls = {
                node.func.id
                for node in ast.walk(module)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not calls & {"eval", "exec", "compile", "__import__"}, path


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_plugin_sees_only_what_the_design_allows(package: str) -> None:
    (folder,) = [folder for folder in PACKAGES if folder.name == package]
    for path, module in sources(folder):
        used = {name for name in imports(module) if name.partition(".")[0] == "kvx" and is_module(name)}
        allowed = ALLOWED[package] | (
            BENCH if path.parent == folder and path.name in ("driver.py", "steps.py") else set()
        )
        assert not {name for name in used if name not in allowed and name != "kvx.core"}, path


def test_the_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_folders_of_packages_are_no_packages() -> None:
    for folder in ("transports", "adapters", "conformance", "tests"):
        assert not list((ROOT / folder).glob("__init__.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_entry_points_name_modules_of_this_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert set(groups) == {"kvx", "kvx.commands", "sglang.srt.plugins", "vllm.general_plugins"}
    for target in [value for group in groups.values() for value in group.values()]:
        module = target.partition(":")[0].replace(".", "/") + ".py"
        assert [folder for folder in PACKAGES if (folder.parent / module).is_file()], target


def test_base_dependencies_are_four() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.partition(">")[0] for line in project["dependencies"]] == ["attrs", "msgspec", "numpy", "pluggy"]


@pytest.mark.slow
def test_a_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {folder.name for folder in PACKAGES}
    assert "kvx/py.typed" in names
    contents = [name for name in names if ".dist-info/" not in name]
    assert all(name.endswith((".py", "py.typed", ".bin", ".json", ".toml")) for name in contents)
