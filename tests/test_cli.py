from __future__ import annotations

import importlib.metadata
import json
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx import cli, doctor
from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Outcome, Reason, Region, Role
from kvx.engine import EngineInstance, Expose
from kvx.instance import make_ticket, open_instance
from kvx.plugins import Plugins
from kvx.tracing import EventLog

SECRET = "0123456789abcdef"
EPOCH = secrets.randbits(63)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("KVX_SECRET_FILE", str(tmp_path / "secret"))
    return Options.load({"listen": address})


@pytest.fixture
def instance(options: Options) -> Iterator[EngineInstance]:
    memory = np.zeros(4 * 64, dtype=np.uint8)
    group = CacheGroup(0, "full", 16, (LayerSpec("l", 0, 0, 64, 64),), 1, 1)
    regions = [Region(0, memory.ctypes.data, memory.nbytes)]
    opened = open_instance(options, Layout("m", "u8", "v", (group,), 4), regions, epoch=EPOCH)
    yield opened
    opened.close()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvx", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def document(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """What a command prints with --json: one object on stdout and nothing else."""
    assert cli.main([*words, "--json"]) == status
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["kvx"]
    assert printed["host"]["cpus"] >= 1
    return printed


def test_help_teaches() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for word in ("doctor", "release", "bench", "sim", "KVX_CONFIG", "exit status", "examples"):
        assert word in shown.stdout


@pytest.mark.parametrize("words", [[], ["nonsense"], ["status"], ["bench"], ["bench", "planner", "--blocks", "0"]])
def test_wrong_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: kvx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "env", "status", "said"),
    [
        (["status", "127.0.0.1:1"], {"KVX_LEASE": "3"}, 2, "did you mean 'lease_s'"),
        (["status", "here"], {}, 2, "HOST:PORT"),
        (["status", "127.0.0.1:1"], {}, 1, "nobody listens at 127.0.0.1:1"),
        (["release", "nonsense"], {}, 2, "not a ticket"),
        (["bench", "transport", "--transports", "nope"], {}, 2, "no transport 'nope'"),
        (["bench", "transport", "--op", "copy"], {}, 2, "'copy' is not a valid Op"),
        (["doctor", "--json", "/proc/nowhere/x.json"], {}, 2, "cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str],
    env: dict[str, str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(words) == status
    printed = capsys.readouterr().err
    assert printed.startswith("kvx: ")
    assert said in printed
    assert printed.count("\n") == 1


def test_the_program_passes_the_status_on() -> None:
    done = run("status", "here")
    assert done.returncode == 2
    assert done.stderr.startswith("kvx: ")
    assert done.stderr.count("\n") == 1


def test_a_command_whose_package_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = importlib.metadata.EntryPoint("far", "no_such_package:far", cli.COMMANDS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [missing])
    assert cli.main(["far"]) == 2
    assert "command 'far' needs something that is not installed" in capsys.readouterr().err


def test_a_further_command_gets_the_rest_of_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_further", lambda entry: lambda words: 40 + len(words))
    assert cli.main(["sim", "--seeds", "3"]) == 42


def test_status_release_and_drain_speak_to_an_instance(
    instance: EngineInstance, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BlockTable.of([1, 2])
    instance.put([Expose("t1", Mode.PULL, blocks, (0,), 32, 30.0)])
    ticket = make_ticket(options, epoch=EPOCH, transfer="t1", first=(0,), blocks=blocks, tokens=32, lease_s=30.0)

    status = document(capsys, "status", options.advertise)
    assert status["schema"] == "kvx.status/1"
    assert list(status["outcome"]["body"]["open"]) == ["t1"]

    assert document(capsys, "release", ticket)["outcome"]["ok"] is True
    again = document(capsys, "release", ticket, status=1)
    assert again["outcome"]["ok"] is False

    assert document(capsys, "drain", options.advertise, "--grace-s", "1")["outcome"]["ok"] is True
    assert document(capsys, "status", options.advertise)["outcome"]["body"]["draining"] is True


def test_drain_waits_until_nothing_is_open_or_says_what_is(
    instance: EngineInstance, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.put([Expose("t1", Mode.PULL, BlockTable.of([1, 2]), (0,), 32, 60.0)])
    assert list(document(capsys, "status", options.advertise)["outcome"]["body"]["open"]) == ["t1"]
    assert cli.main(["drain", options.advertise, "--grace-s", "60", "--wait-s", "0.1"]) == 1
    assert f"{options.advertise} still has 1 open transfers after 0.1 s" in capsys.readouterr().err
    told = document(capsys, "drain", options.advertise, "--grace-s", "0.1", "--wait-s", "60")["outcome"]["body"]
    assert (told["draining"], told["open"]) == (True, {})


def test_another_secret_gets_no_answer(
    instance: EngineInstance, options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVX_SECRET_FILE")
    monkeypatch.setenv("KVX_SECRET", "another-secret-of-20")
    assert cli.main(["status", options.advertise]) == 1
    assert "secret" in capsys.readouterr().err


def test_benches_print_verified_figures(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--bytes", "65536", "--pieces", "4", "--repeat", "2")
    moved = document(capsys, "bench", "transport", *small)
    assert {(row["name"], row["op"]) for row in moved["results"]} >= {
        ("tcp", "read"),
        ("tcp", "write"),
        ("memcpy", "write"),
    }
    assert all(row["verified"] and len(row["samples"]) == 2 for row in moved["results"])
    planned = document(capsys, "bench", "planner", "--blocks", "8", "--layers", "2", "--layout", "fragmented")
    assert [row["case"] for row in planned["results"]] == ["fragmented"]
    called = document(capsys, "bench", "callbacks", "--open", "3", "--rounds", "1")
    assert [(row["open"], row["moving"]) for row in called["results"]] == [(3, False), (3, True)]
    assert called["verified"]
    size = ("--layers", "2", "--bytes", "65536", "--pieces", "8", "--prefill-ms", "2", "--modes", "pull,push")
    handed = document(capsys, "bench", "handoff", *size, "--repeat", "1")
    assert [(row["mode"], row["verified"]) for row in handed["results"]] == [("pull", True), ("push", True)]


def test_doctor_reports_every_check(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    Path(options.secret_file).chmod(0o644)
    found = {check["name"]: check for check in document(capsys, "doctor", status=1)["checks"]}
    assert {"python", "kvx", "attrs", "plugin tcp", "transports", "engine vllm", "port", "open files", "cpu"} <= set(
        found
    )
    assert found["router"]["detail"].startswith("aiohttp ")
    assert found["python"] == {"name": "python", "ok": True, "detail": platform.python_version(), "fix": ""}
    assert not found["secret"]["ok"]
    assert found["secret"]["fix"] == f"chmod 600 {options.secret_file}"
    Path(options.secret_file).chmod(0o600)
    assert next(check for check in doctor.examine(Plugins()) if check.name == "secret").ok


def test_doctor_for_a_person(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVX_LISTEN", "nowhere")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "BAD  options" in printed
    assert "-> correct the KVX_ variables" in printed


def test_doctor_sees_a_port_in_use_and_a_broken_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins()
    plugins.set_aside("far", "it is too far")
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        monkeypatch.setenv("KVX_LISTEN", f"127.0.0.1:{used.getsockname()[1]}")
        found = {check.name: check for check in doctor.examine(plugins)}
    assert not found["port"].ok
    assert not found["plugin far"].ok
    assert "too far" in found["plugin far"].detail
    assert not found["transports"].ok
    assert not found["transport tcp"].ok


def test_the_event_log_has_a_line_for_each_outcome(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for rank in range(2):
        log = EventLog(str(path), f"p#{rank}")
        log.write(
            Outcome("t", rank == 0, None if rank == 0 else Reason.EPOCH, "why", Mode.PUSH, Role.CONSUMER, 5, 0.5, 2)
        )
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["peer"], first["ok"], first["reason"], first["bytes"]) == ("p#0", True, None, 5)
    assert (second["peer"], second["ok"], second["reason"], second["mode"]) == ("p#1", False, "epoch", "push")


def test_an_event_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="event_log"):
        EventLog(str(tmp_path / "no" / "such"), "p#0")
