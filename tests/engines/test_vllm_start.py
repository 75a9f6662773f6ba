"""What cannot work ends vLLM's first process at once: one sentence of kvx, exit status 2, no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from kvx.core.errors import ConfigError
from kvx.driver import Server
from kvx_vllm.driver import VllmDriver

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def run(options: dict[str, Any]) -> tuple[int, str]:
    """vLLM's command line as a user may type it, with options that the driver itself would refuse."""
    launch = VllmDriver().launch(Server("no-such-model", 1, options={}))
    command = tuple(
        word.replace('"kv_connector_extra_config": {}', f'"kv_connector_extra_config": {options}')
        for word in launch.command
    )
    launch = evolve(launch, command=tuple(word.replace("'", '"') for word in command))
    env = {**os.environ, **launch.env}
    done = subprocess.run(launch.command, check=False, env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


def the_sentence(status: int, text: str) -> str:
    assert status == 2, text
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if "kvx cannot start" in line]
    return line


def test_an_unknown_option() -> None:
    assert "did you mean 'lease_s'" in the_sentence(*run({"leese_s": 3}))


def test_a_control_port_in_use(keep: Callable[[str, Any], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = the_sentence(*run({"listen": address}))
    keep("vllm_port_in_use", {"exit_status": 2, "line": line.replace(address, "HOST:PORT")})
    assert "set listen to a free port" in line


@pytest.mark.parametrize("options", [{"leese_s": 3}, {"advertise": "0.0.0.0:5700"}, {"lease_s": 1}])
def test_the_driver_refuses_before_it_starts_anything(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VllmDriver().launch(Server("model", 1, options=options))
