"""The driver, as kvx finds and uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvx import __version__, plugins
from kvx.core.errors import ConfigError
from kvx.dialect import CompletionsDialect
from kvx.driver import Server
from kvx_reference.driver import ReferenceDriver
from kvx_reference.engine.config import read_config


def test_the_driver_is_found_by_its_name() -> None:
    driver = plugins.load().driver("reference")
    assert isinstance(driver, ReferenceDriver)
    assert isinstance(driver.dialect, CompletionsDialect)
    assert driver.installed() == driver.tested == __version__


def test_a_launch_names_the_model_the_port_and_kvx_options() -> None:
    options = {"listen": "127.0.0.1:5712", "transports": ["tcp"]}
    launch = ReferenceDriver().launch(Server("folder", 8123, options=options, arguments=("--blocks", "9")))
    command = " ".join(launch.command[1:])
    assert command.startswith("-m kvx_reference.engine --model folder --host 127.0.0.1 --port 8123 --connector ")
    assert json.loads(launch.command[launch.command.index("--connector-options") + 1]) == options
    assert launch.command[-2:] == ("--blocks", "9")
    assert launch.ready_path == "/health"


def test_a_single_instance_knows_nothing_of_kvx() -> None:
    launch = ReferenceDriver().launch(Server("folder", 8123))
    assert "--connector" not in launch.command


def test_options_that_cannot_work_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="lisen"):
        ReferenceDriver().launch(Server("folder", 8123, options={"lisen": "127.0.0.1:1"}))


def test_a_small_model_is_made_by_its_command(tmp_path: Path) -> None:
    small = ReferenceDriver().small_model(str(tmp_path / "tiny"))
    subprocess.run(small.make, check=True, timeout=50)
    config = read_config(tmp_path / "tiny")
    assert max(small.tokens) < config.vocab_size
    assert not config.eos & set(small.tokens)
    assert 16 * small.block_size < config.max_position


def test_an_engine_whose_kvx_cannot_start_says_why() -> None:
    options = json.dumps({"listen": "0.0.0.0:5799", "advertise": "192.0.2.1:5799"})
    command = [sys.executable, "-m", "kvx_reference.engine", "--random", "0", "--connector-options", options]
    command += ["--connector", "kvx_reference.adapter:open_connector"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "beyond loopback" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_the_plugin_imports_no_server() -> None:
    program = "import sys, kvx_reference.plugin as p; p.kvx_drivers(); print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "False"
