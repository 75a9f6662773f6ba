from __future__ import annotations

import json
import socket

import pytest

from kvx.core.errors import ConfigError
from kvx_vllm.preflight import check, settings_on
from kvx_vllm.versions import check_version

CONFIG = json.dumps({"kv_connector": "KvxConnector", "kv_connector_extra_config": {"lease_s": 20}})


def multi(*connectors: object) -> str:
    extra = {"connectors": list(connectors)}
    return json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra})


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", CONFIG],
        [f"--kv-transfer-config={CONFIG}"],
        ["--kv_transfer_config", CONFIG],
        ["--kv-transfer-config", "{}", "--kv-transfer-config", CONFIG],
        ["serve", "--port", "1", f"--kv_transfer_config={CONFIG}", "--x"],
        ["--kv-transfer-config", multi({"kv_connector": "OffloadingConnector"}, json.loads(CONFIG))],
    ],
)
def test_settings_are_found_however_the_flag_is_written(words: list[str]) -> None:
    assert settings_on(words, "KvxConnector") == {"lease_s": 20}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--kv-transfer-config"],
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[]"],
        ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector"})],
        ["--kv-transfer-config", multi({"kv_connector": "NixlConnector"}, 3)],
        ["--kv-transfer-config", json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": 3})],
    ],
)
def test_what_is_not_for_kvx_is_left_to_vllm(words: list[str]) -> None:
    assert settings_on(words, "KvxConnector") is None


def test_an_unknown_key_and_a_port_in_use_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lease_s'"):
        check({"leese_s": 20})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            check({"listen": address, "allow_untested_engine": True})


def test_the_port_is_free_again_after_the_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    check({"listen": address, "allow_untested_engine": True})
    check({"listen": address, "allow_untested_engine": True})


def test_other_versions_of_vllm_are_refused_unless_allowed() -> None:
    check_version(False, "0.31.0")
    check_version(False, "0.32.7")
    check_version(True, "0.40.0")
    for version in ("0.30.0", "0.33.0", "0.320", "0.3"):
        with pytest.raises(ConfigError, match=f"vLLM {version} was not tested"):
            check_version(False, version)
