from __future__ import annotations

import json
import logging
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kvx.core.errors import ConfigError
from kvx.driver import Server
from kvx_vllm import plugin
from kvx_vllm.driver import VllmDriver

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for vLLM's factory, and what is registered there."""

    class Factory:
        _registry: ClassVar[dict[str, Any]] = {}

        @classmethod
        def register_connector(cls, name: str, module: str, symbol: str) -> None:
            assert name not in cls._registry, "vLLM raises at a second registration"
            cls._registry[name] = (module, symbol)

    for depth in range(1, FACTORY.count(".") + 1):
        name = ".".join(FACTORY.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(FACTORY)
    monkeypatch.setattr(module, "KVConnectorFactory", Factory, raising=False)
    monkeypatch.setitem(sys.modules, FACTORY, module)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    return Factory._registry


def test_register_may_run_more_than_once(registered: dict[str, Any]) -> None:
    plugin.register()
    plugin.register()
    assert registered == {"KvxConnector": ("kvx_vllm.connector", "KvxConnector")}


def test_register_never_keeps_a_host_without_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "could not be registered" in caplog.text


def test_a_wrong_option_on_the_command_line_ends_the_start_with_status_2(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"kv_connector": "KvxConnector", "kv_connector_extra_config": {"leese_s": 1}})
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--kv-transfer-config", config])
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    assert ended.value.code == 2
    assert "kvx cannot start: " in capsys.readouterr().err


def test_the_driver_writes_vllms_command_line() -> None:
    launch = VllmDriver().launch(Server("model", 8100, options={"lease_s": 20}, arguments=("--dtype", "float32")))
    config = json.loads(launch.command[launch.command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KvxConnector"
    assert config["kv_connector_extra_config"] == {"lease_s": 20}
    assert launch.command[-2:] == ("--dtype", "float32")
    assert launch.ready_path == "/health"


def test_a_single_instance_is_started_without_kvx() -> None:
    assert "--kv-transfer-config" not in VllmDriver().launch(Server("model", 8100)).command


def test_the_driver_refuses_options_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        VllmDriver().launch(Server("model", 8100, options={"leese_s": 20}))
