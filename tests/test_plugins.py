from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvx import plugins
from kvx.core.errors import ConfigError, PluginError, TransportError
from kvx.core.model import CacheGroup, InstanceInfo, LayerSpec, Layout, Mode, Outcome
from kvx.driver import RequestInfo
from kvx.hookspecs import hookimpl
from kvx.plugins import Plugins


def plugin(**hooks: Callable[..., Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})


def info(*transports: str) -> InstanceInfo:
    group = CacheGroup(0, "full", 16, (LayerSpec("l", 0, 0, 64, 64),), 1, 1)
    return InstanceInfo("i", 0, 1, "127.0.0.1:1", Layout("m", "f", "v", (group,), 4), transports)


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Plugins]:
    """Installs modules, given as source by name, as the only plugins."""

    def install(sources: Mapping[str, str]) -> Plugins:
        points = []
        for name, source in sources.items():
            (tmp_path / f"plugin_{name}.py").write_text(source)
            points.append(importlib.metadata.EntryPoint(name, f"plugin_{name}", plugins.GROUP))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == plugins.GROUP else [])
        return plugins.load()

    return install


GOOD = "from kvx.hookspecs import hookimpl\n@hookimpl\ndef kvx_transports():\n    return {'good': dict}\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit"),
        ("syntax error", "SyntaxError"),
        ("from kvx.hookspecs import hookimpl\n@hookimpl\ndef kvx_nothing(): ...\n", "not kvx's"),
        ("from kvx.hookspecs import hookimpl\n@hookimpl\ndef kvx_transports(wrong): ...\n", "not kvx's"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_breaks_only_itself(
    entry_points: Callable[[Mapping[str, str]], Plugins], source: str, said: str
) -> None:
    loaded = entry_points({"bad": source, "good": GOOD})
    assert loaded.names == ["good"]
    assert loaded.make_transport("good", {"a": 1}) == {"a": 1}  # type: ignore[comparison-overlap]
    for name in ("bad", "bad-variant"):
        with pytest.raises(PluginError, match=said):
            loaded.make_transport(name, {})


@pytest.mark.parametrize("answer", ["1/0", "3", "{'tcp': dict}", "{'badly': dict}"])
def test_a_plugin_whose_hook_fails_breaks_only_itself(
    entry_points: Callable[[Mapping[str, str]], Plugins], answer: str
) -> None:
    source = f"from kvx.hookspecs import hookimpl\n@hookimpl\ndef kvx_transports():\n    return {answer}\n"
    loaded = entry_points({"bad": source, "good": GOOD})
    assert sorted(loaded.transports()) == ["good"]
    assert list(loaded.broken) == ["bad"]
    assert isinstance(loaded.broken["bad"], PluginError)
    assert loaded.names == ["good"]


def test_two_plugins_of_one_name_are_not_mixed() -> None:
    loaded = Plugins()
    loaded.add("x", plugin(kvx_transports=lambda: {"x": dict}))
    with pytest.raises(PluginError, match="two plugins are called 'x'"):
        loaded.add("x", plugin())


def test_variants_belong_to_their_plugin() -> None:
    loaded = Plugins()
    loaded.add("nixl", plugin(kvx_transports=lambda: {"nixl-ucx": dict, "nixl-libfabric": dict}))
    assert loaded.make_transport("nixl-ucx", {}) == {}  # type: ignore[comparison-overlap]


def test_a_name_that_nobody_has_says_what_to_install() -> None:
    with pytest.raises(
        PluginError, match=r"no transport 'vllm' here, only: none. Install it with: pip install 'kvx\[vllm\]'"
    ):
        Plugins().make_transport("vllm", {})
    with pytest.raises(PluginError, match=r"no engine 'zzz' here, only: none. Install the distribution"):
        Plugins().driver("zzz")


def test_what_a_factory_raises() -> None:
    def factory(options: Mapping[str, Any]) -> Any:
        raise options["raise"]

    loaded = Plugins()
    loaded.add("x", plugin(kvx_transports=lambda: {"x": factory}))
    for error in (TransportError("t"), ConfigError("c")):
        with pytest.raises(type(error)) as caught:
            loaded.make_transport("x", {"raise": error})
        assert caught.value is error
    with pytest.raises(PluginError, match="not installed: No module named 'nixl'"):
        loaded.make_transport("x", {"raise": ImportError("No module named 'nixl'")})


def test_a_factory_may_be_named_by_its_module() -> None:
    assert Plugins().make_transport("builtins:dict", {"a": 1}) == {"a": 1}  # type: ignore[comparison-overlap]
    for name, said in [
        ("no_such:thing", "No module"),
        ("builtins:no_such", "no_such"),
        ("sys:maxsize", "factory"),
        (":x", "Empty module name"),
    ]:
        with pytest.raises(PluginError, match=said):
            Plugins().make_transport(name, {})


def test_a_driver_may_be_named_by_its_module() -> None:
    assert Plugins().driver("builtins:dict") == {}  # type: ignore[comparison-overlap]
    with pytest.raises(PluginError, match="engine 'sys:maxsize' is not a factory"):
        Plugins().driver("sys:maxsize")


def test_a_choice_has_to_be_common_to_both_sides() -> None:
    loaded = Plugins()
    both = (info("a", "b"), info("b", "a"))
    assert loaded.choose_transport(*both) == "a"
    assert loaded.choose_transport(info("a"), info("b")) is None
    loaded.add("1", plugin(kvx_choose_transport=lambda local, remote: "c"))
    loaded.add("2", plugin(kvx_choose_transport=lambda local: None))
    assert loaded.choose_transport(*both) == "a"
    loaded.add("3", plugin(kvx_choose_transport=lambda local: "b"))
    assert loaded.choose_transport(*both) == "b"


def test_the_first_choice_of_a_mode_counts() -> None:
    loaded = Plugins()
    assert loaded.choose_mode(RequestInfo("m")) is None
    loaded.add("b", plugin(kvx_choose_mode=lambda request: Mode.PULL))
    loaded.add("a", plugin(kvx_choose_mode=lambda request: Mode.PUSH if request.prompt_tokens else None))
    assert loaded.choose_mode(RequestInfo("m")) is Mode.PULL
    assert loaded.choose_mode(RequestInfo("m", prompt_tokens=9)) is Mode.PUSH


def test_an_observer_that_fails_is_counted_and_stops_nobody() -> None:
    seen: list[Outcome] = []

    def record(outcome: Outcome) -> None:
        seen.append(outcome)

    loaded = Plugins()
    loaded.add("a", plugin(kvx_transfer_finished=lambda outcome: 1 / 0))
    loaded.add("b", plugin(kvx_transfer_finished=record))
    outcome = Outcome("t", True)
    for _ in range(2):
        loaded.transfer_finished(outcome)
    assert seen == [outcome, outcome]
    assert loaded.observer_errors == 2
    assert loaded.broken == {}


def test_loading_all_plugins_imports_nothing_heavy() -> None:
    program = """
import sys, time
import attrs, importlib.metadata, logging, msgspec, numpy, pluggy
before = time.perf_counter()
import kvx
from kvx import plugins
loaded = plugins.load()
print(f"{(time.perf_counter() - before) * 1e3:.1f} ms, plugins: {loaded.names}")
# Making attrs classes is what costs: none of the modules that hold many is there yet.
costly = {"kvx.core.model", "kvx.core.events", "kvx.core.messages", "kvx.config", "kvx.driver"} & set(sys.modules)
assert not costly, costly
loaded.transports(), loaded.drivers()
assert not loaded.broken, loaded.broken
heavy = {"torch", "vllm", "sglang", "nixl", "prometheus_client", "pytest", "hypothesis"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
