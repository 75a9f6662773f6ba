from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvx import plugins
from kvx.core.errors import ConfigError
from kvx_sglang import plugin, preflight
from kvx_sglang.versions import TESTED

ASKED = ["launch_server", "--model-path", "m", preflight.FLAG, "kvx"]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx_sglang.versions.installed_version", lambda: TESTED)


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        (ASKED, True),
        (["x", f"{preflight.FLAG}=kvx"], True),
        (["x", preflight.FLAG, "kvx", f"{preflight.FLAG}=nixl"], False),
        (["x", preflight.FLAG], False),
        (["x", "kvx"], False),
        ([], False),
    ],
)
def test_the_command_line_tells_who_asks(line: list[str], asks: bool) -> None:
    assert preflight.asks_for(line) is asks


def test_the_driver_is_found_by_kvx() -> None:
    assert "sglang" in plugins.load().drivers()


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, kvx_sglang.plugin; print(sorted({'torch', 'sglang', 'numpy', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


# -------------------------------------------------- kvx is had, or the server says why not


def broken_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang in which nothing is where this adapter looks for it."""
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))


def test_a_server_that_asked_for_kvx_and_cannot_have_it_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_sglang(monkeypatch)
    monkeypatch.setattr(sys, "argv", ASKED)
    with pytest.raises(SystemExit) as end:
        plugin.load()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvx cannot start: ")


@pytest.mark.parametrize("line", [["launch_server", preflight.FLAG, "nixl"], ["launch_server"]])
def test_other_servers_start_whatever_is_wrong_with_kvx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, line: list[str]
) -> None:
    broken_sglang(monkeypatch)
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setenv("KVX_LEASE_S", "nonsense")
    plugin.load()
    assert "cannot be registered" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVX_MODE", "pull", "it can push only|can push there only"),
        ("KVX_LEASES", "3", "did you mean 'lease_s'"),
        ("KVX_LISTEN", "0.0.0.0:5700", "advertise"),
    ],
)
@pytest.mark.usefixtures("tested")
def test_options_that_cannot_work(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=says):
        preflight.check()


@pytest.mark.usefixtures("tested")
def test_a_control_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("KVX_LISTEN", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="KVX_LISTEN"):
            preflight.check()


def test_another_version_is_refused_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx_sglang.versions.installed_version", lambda: "0.6.0")
    monkeypatch.setenv("KVX_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVX_INSTANCE", "p")
    with pytest.raises(ConfigError, match=r"SGLang 0\.6\.0 was not tested"):
        preflight.check()
    monkeypatch.setenv("KVX_ALLOW_UNTESTED_ENGINE", "true")
    preflight.check()


@pytest.mark.parametrize("chosen", [None, "60"])
@pytest.mark.usefixtures("tested")
def test_pages_of_failed_requests_are_not_freed_by_time(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    """SGLang's own default frees them after 30 s."""
    monkeypatch.setattr("kvx_sglang.compat.register_backend", lambda: None)
    monkeypatch.setenv("KVX_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVX_INSTANCE", "d")
    monkeypatch.setenv(preflight.HOLD, chosen or "")
    if chosen is None:
        monkeypatch.delenv(preflight.HOLD)
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    plugin.load()
    assert os.environ.get(preflight.HOLD) == chosen
    monkeypatch.setattr(sys, "argv", ASKED)
    plugin.load()
    assert os.environ[preflight.HOLD] == (chosen or str(preflight.HOLD_S))


# ---------------------------------------------------------------------- in a real SGLang


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/nowhere", *arguments]
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **cpu, **env}
    )


@pytest.mark.sglang
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("env", "says"), [({"KVX_MODE": "pull"}, "option mode is pull"), ({"KVX_LEASE_S": "0"}, "option lease_s")]
)
def test_a_real_server_ends_with_one_sentence(env: dict[str, str], says: str) -> None:
    done = launch("--device", "cpu", "--disaggregation-mode", "prefill", preflight.FLAG, "kvx", **env)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvx cannot start: "), done.stderr
    assert says in last


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("context")
def test_the_backend_has_its_classes_and_the_others_keep_theirs() -> None:
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins import load_plugins

    plugin.load()
    plugin.load()
    load_plugins()
    kinds: Any = utils.KVClassType
    found = {kind.name: utils.get_kv_class(utils.TransferBackend("kvx"), kind).__name__ for kind in kinds}
    assert found == {
        "KVARGS": "KVArgs",
        "MANAGER": "KvxManager",
        "SENDER": "KvxSender",
        "RECEIVER": "KvxReceiver",
        "BOOTSTRAP_SERVER": "KvxBootstrapServer",
    }
    fake = utils.get_kv_class(utils.TransferBackend("fake"), kinds.SENDER)
    assert fake.__name__ == "FakeKVSender"
    assert Path(sys.modules["kvx_sglang.manager"].__file__ or "").name == "manager.py"
