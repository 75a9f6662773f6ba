"""`kvx up` and `kvx router` as a person starts them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from attrs import frozen

from kvx import cli, up
from kvx.cluster import Cluster, ClusterError, free_ports, group_members, wait_stopped
from kvx.dialect import CompletionsDialect
from kvx.driver import Launch
from kvx.plugins import Plugins

LOST_BOUND_S = 16.0
"""docs/operations.md: the peer dies in mid-transfer."""


@frozen
class Running:
    """A local cluster: the process that keeps it, its router, and URL and pid of each engine server by name."""

    process: subprocess.Popen[str]
    router: str
    urls: Mapping[str, str]
    pids: Mapping[str, int]
    model: str


def post(url: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def get(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", parts.path)
        told: dict[str, Any] = json.loads(connection.getresponse().read())
        return told


def is_loading(url: str, model: str) -> bool:
    """Whether a transfer is open at this engine server."""
    _, answer = post(url, CompletionsDialect().probe_request(model))
    return bool(answer["kv_transfer_params"]["kvx"]["open"])


def until(condition: Callable[[], object], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    command = [sys.executable, "-m", "kvx", "up", "--prefill", "2", "--decode", "2", "--mode", "push"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    text = "".join(lines)
    found = re.findall(r"^  (\S+) +(http://\S+) .*pid (\d+)$", text, re.MULTILINE)
    router = re.search(r"^  router +(http://\S+)", text, re.MULTILINE)
    example = re.search(r"-d '(.*)'$", text, re.MULTILINE)
    assert router, text
    assert example, text
    yield Running(
        process,
        router[1],
        {name: url for name, url, _ in found},
        {name: int(pid) for name, _, pid in found},
        json.loads(example[1])["model"],
    )
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cluster_serves_survives_a_kill_and_leaves_nothing(
    running: Running, evidence: Callable[[str, Mapping[str, Any]], None]
) -> None:
    def ask(prompt: list[int]) -> dict[str, Any]:
        fixed = {"model": running.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return {**fixed, "prompt": prompt, "return_token_ids": True}

    prompts = [[3 + (7 * i + j) % 2000 for j in range(70)] for i in range(3)]
    alone = [post(running.urls["prefill-1"], ask(prompt))[1]["choices"][0]["token_ids"] for prompt in prompts]
    for prompt, tokens in zip(prompts[:2], alone[:2], strict=True):  # both pairs get to know each other
        status, answer = post(running.router, ask(prompt))
        assert (status, answer["choices"][0]["token_ids"]) == (200, tokens)
        assert answer["kv_transfer_params"]["kvx"]["ok"] is True

    # The next request goes to the first pair. Its prefill server stands still, so it is in the middle of it.
    os.kill(running.pids["prefill-0"], signal.SIGSTOP)
    wait_stopped(running.pids["prefill-0"])
    told: dict[str, Any] = {}

    def request() -> None:
        told["answer"] = post(running.router, ask(prompts[2]))
        told["after_s"] = time.monotonic() - killed

    killed = time.monotonic()
    client = threading.Thread(target=request)
    client.start()
    assert until(lambda: get(f"{running.router}/status")["prefill"][0]["open"] == 1, 20)
    decoders = [url for name, url in running.urls.items() if name.startswith("decode")]
    assert until(lambda: any(is_loading(url, running.model) for url in decoders), 20)  # one has offered its blocks
    killed = time.monotonic()
    os.kill(running.pids["prefill-0"], signal.SIGKILL)
    client.join(60)
    status, answer = told["answer"]
    evidence(
        "router_killed_prefill",
        {
            "status": status,
            "bound_s": LOST_BOUND_S,
            "answered_after_s": told["after_s"],
            "kvx": answer.get("kv_transfer_params"),
        },
    )
    assert (status, answer["choices"][0]["token_ids"]) == (200, alone[2])  # recomputed
    assert answer["kv_transfer_params"]["kvx"]["ok"] is False
    assert told["after_s"] < LOST_BOUND_S
    for prompt, tokens in zip(prompts, alone, strict=True):  # and the rest of the cluster goes on
        status, answer = post(running.router, ask(prompt))
        assert (status, answer["choices"][0]["token_ids"]) == (200, tokens)
    assert [one["up"] for one in get(f"{running.router}/status")["prefill"]] == [False, True]

    running.process.send_signal(signal.SIGINT)
    _, said = running.process.communicate(timeout=60)
    assert running.process.returncode == 0, said
    assert "prefill-0 has ended with status -9" in said
    assert [pid for pid in running.pids.values() if group_members(pid)] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["router"], "at least one prefill URL"),
        (["router", "--prefill", "http://p"], "at least one decode URL"),
        (["router", "--prefill", "p:8100", "--decode", "http://d"], "'p:8100' is not a URL such as"),
        (["router", "--prefill", "http://p=nowhere", "--decode", "http://d"], "'nowhere' is not HOST:PORT"),
        (["router", "--prefill", "http://p", "--prefill", "http://p/", "--decode", "http://d"], "have the same URL"),
        (["router", "--prefill", "http://p", "--decode", "http://p"], "http://p stands in both pools"),
        (["router", "--pools", "/nowhere.toml"], "pool file /nowhere.toml: "),
        (["router", "--pools", "/nowhere.toml", "--decode", "http://d"], "give either it or --prefill and --decode"),
        (["router", "--host", "0.0.0.0", "--prefill", "http://p", "--decode", "http://d"], "beyond loopback"),
        (["router", "--api-key-file", "/nowhere", "--prefill", "http://p", "--decode", "http://d"], "cannot be read"),
        (["router", "--engine", "nope", "--prefill", "http://p", "--decode", "http://d"], "no engine 'nope'"),
        (["up", "--engine", "nope"], "no engine 'nope'"),
        (["demo", "--engine", "nope"], "no engine 'nope'"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.startswith("kvx: ")
    assert printed.count("\n") == 1


def test_without_its_router_a_cluster_ends(tmp_path: Path) -> None:
    said: list[str] = []
    told = tmp_path / "told"

    def say(line: str) -> None:
        said.append(line)
        told.touch()

    router = f"import os, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.01)\nexit('no port')"
    with Cluster(tmp_path) as cluster:
        for name, code in (("prefill-0", "raise SystemExit(3)"), ("router", router)):
            cluster.start(name, Launch((sys.executable, "-c", code), {}, "/health"), "http://127.0.0.1:1")
        with pytest.raises(ClusterError, match=r"(?s)the router died.*no port"):
            up._watch(cluster, cluster.children[1], say)
    assert said[0].startswith("prefill-0 has ended with status 3")
    assert len(said) == 1


def test_an_end_that_no_look_has_seen_is_told_at_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with Cluster(tmp_path) as cluster:
        for name in ("prefill-0", "router"):
            sleeping = (sys.executable, "-c", "import time; time.sleep(60)")
            cluster.start(name, Launch(sleeping, {}, "/health"), "http://127.0.0.1:1")
        prefill, router = cluster.children

        def dies_between_two_looks(seconds: float) -> None:
            prefill.process.kill()
            prefill.process.wait()  # without a limit, as one would sleep
            raise KeyboardInterrupt

        monkeypatch.setattr(up.time, "sleep", dies_between_two_looks)
        with pytest.raises(KeyboardInterrupt):
            up._watch(cluster, router, said.append)
        monkeypatch.undo()
    assert [line.split(";")[0] for line in said] == ["prefill-0 has ended with status -9"]


def test_what_stands_behind_the_dashes_goes_to_the_engines() -> None:
    given = cli._parser(()).parse_args(["up", "--decode", "2", "--", "--max-model-len", "64"])
    assert (given.decode, given.arguments) == (2, ["--max-model-len", "64"])


def test_an_engine_that_is_not_here_is_named_with_its_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent:
        def installed(self) -> None:
            return None

    monkeypatch.setattr(Plugins, "driver", lambda self, name: Absent())
    assert cli.main(["demo", "--engine", "far"]) == 2
    assert "run `make env-far` and use .venvs/far/bin/kvx" in capsys.readouterr().err


def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["up"]) == 2
    assert "pip install 'kvx[router]'" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("kvx.router")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.main(["router", "--prefill", "http://p", "--decode", "http://d"]) == 2
    assert "pip install 'kvx[router]'" in capsys.readouterr().err


def test_an_option_for_every_instance_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVX_LISTEN", "127.0.0.1:5700")
    assert cli.main(["up"]) == 2
    assert "KVX_LISTEN is set" in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvx",
                "router",
                "--port",
                str(port),
                "--prefill",
                "http://p",
                "--decode",
                "http://d",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_router_ends_on_a_signal_though_its_instances_are_mute(number: signal.Signals) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        (port,) = free_ports(1)
        nowhere = f"http://127.0.0.1:{mute.getsockname()[1]}"
        command = [sys.executable, "-m", "kvx", "router", "--port", str(port)]
        pools = ["--prefill", nowhere, "--decode", f"{nowhere}/other"]
        process = subprocess.Popen([*command, *pools], stderr=subprocess.PIPE)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                get(f"http://127.0.0.1:{port}/health")
                return True
            return False

        try:
            assert until(answers, 30)
            process.send_signal(number)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
