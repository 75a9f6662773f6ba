"""Real servers for the engine tests: as few as do it, each pair started once and stopped for sure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field, frozen

from kvx.cluster import Child, Cluster, free_ports
from kvx.core.model import Mode
from kvx.driver import Launch, Server
from kvx.operator import ask
from kvx_conformance.suite.servers import SHORT
from kvx_vllm.driver import VllmDriver

MUTANT = os.environ.get("MUTANT", "")
"""A connector of `mutants.py` that every server runs with: then these tests have to fail."""
BLOCK = 32
BLOCK_BYTES = 4 * 4 * BLOCK * 64 * 4
"""Four layers of four heads, keys and values of 32 float32 each."""
ARGUMENTS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
    *("--max-num-seqs", "16", "--block-size", str(BLOCK)),
    *("--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(65 * BLOCK_BYTES)),
)
"""Chunks of 256 tokens; 64 blocks and vLLM's null block, so transfers and requests compete for them."""
OPTIONS = {**SHORT, "max_held_fraction": 1.0}
"""Short bounds, and a pool all of which may be held for transfers."""


@frozen
class Answer:
    """What a server said to a completion, and when (monotonic seconds)."""

    status: int
    body: dict[str, Any]
    started: float
    ended: float

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens

    @property
    def kvx(self) -> dict[str, Any]:
        params = self.body.get("kv_transfer_params") or {}
        kvx: dict[str, Any] = params.get("kvx") or {}
        return kvx


@frozen
class Served:
    """One request through both legs."""

    prefill: Answer
    decode: Answer


@define
class Instance:
    """A running vLLM server and what a test may do to it."""

    child: Child
    server: Server
    control: str
    events: Path
    env: Mapping[str, str]
    _waiting: http.client.HTTPConnection | None = None

    @property
    def url(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    def connect(self, timeout_s: float = 120.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.server.host, self.server.port, timeout=timeout_s)

    def post(self, body: Mapping[str, Any], timeout_s: float = 120.0) -> Answer:
        started = time.monotonic()
        connection = self.connect(timeout_s)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, json.loads(response.read()), started, time.monotonic())

    def abandon(self, body: Mapping[str, Any], after_s: float) -> None:
        """Send a request and close the connection after a while, as a client that leaves."""
        with contextlib.closing(self._send(body)):
            time.sleep(after_s)

    def enter(self, body: Mapping[str, Any]) -> None:
        """Send a request and do not wait for its answer."""
        self._waiting = self._send(body)

    def leave(self) -> None:
        """The client of `enter` closes its connection."""
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _send(self, body: Mapping[str, Any]) -> http.client.HTTPConnection:
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection

    def health(self) -> int:
        """The status of /health."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status

    def metrics(self) -> dict[str, float]:
        """/metrics: name and labels without vLLM's own two, to value."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {re.sub(r'engine="0",?|model_name="tiny",?', "", name): float(value) for name, _, value in lines}

    def preemptions(self) -> float:
        return self.metrics()["vllm:num_preemptions_total{}"]

    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    def probe(self) -> dict[str, Any]:
        return self.post(VllmDriver().dialect.probe_request("tiny")).kvx

    def blocks(self) -> dict[str, int]:
        blocks: dict[str, int] = self.probe()["blocks"]
        return blocks

    def status(self) -> dict[str, Any]:
        """The endpoint's own view, through the control channel: it does not wake the engine."""
        body: dict[str, Any] = json.loads(ask(self.control, "status", secret=b"", timeout_s=10).body)
        return body

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """The event log by transfer."""
        if not self.events.exists():
            return {}
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return {line["transfer"]: line for line in lines}


@define
class Bench:
    """Starts instances of one cluster, and sends requests through two of them."""

    cluster: Cluster
    model: str
    instances: dict[str, Instance] = field(factory=dict)
    dialect: Any = field(factory=lambda: VllmDriver().dialect)

    @staticmethod
    def completion(prompt: list[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**fixed, "prompt": prompt, "max_tokens": tokens, **more}

    @staticmethod
    def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
        draw = random.Random(seed)  # noqa: S311
        return [[draw.randrange(3, 2000) for _ in range(length)] for length in lengths]

    @staticmethod
    def moved(tokens: int) -> int:
        """Bytes of a prompt: whole blocks in every layer."""
        return -(-tokens // BLOCK) * BLOCK_BYTES

    @staticmethod
    def until(condition: Callable[[], object], limit_s: float) -> bool:
        """Whether the condition came true within the limit."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def start(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None, ranks: int = 1, **options: Any
    ) -> Instance:
        control_port = _ports_in_a_row(ranks)
        http_port = next(
            port for port in free_ports(ranks + 1) if port not in range(control_port, control_port + ranks)
        )
        if ranks > 1:
            arguments = (*arguments, "--tensor-parallel-size", str(ranks))
        control = f"127.0.0.1:{control_port}"
        events = self.cluster.logs / f"{name}.events.jsonl"
        given = {**OPTIONS, "listen": control, "event_log": str(events), **options}
        own = tuple(word.replace("{control}", str(control_port)) for word in arguments)
        env = dict(env or {})
        if MUTANT:
            own = (*_mutated(given), *own)
            env.setdefault(
                "PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
            )
        server = Server(self.model, http_port, options=given, arguments=(*ARGUMENTS, *own))
        self.instances[name] = instance = Instance(self._launch(name, server, env), server, control, events, env)
        return instance

    def start_single(self, name: str) -> Instance:
        """vLLM without kvx, with the same arguments: what the right tokens are."""
        (port,) = free_ports(1)
        server = Server(self.model, port, arguments=ARGUMENTS)
        self.instances[name] = instance = Instance(self._launch(name, server, {}), server, "", Path(), {})
        return instance

    def start_router(self, mode: Mode, prefill: Instance, decode: Instance) -> Instance:
        """kvx's router in front of both."""
        (port,) = free_ports(1)
        url, name = f"http://127.0.0.1:{port}", f"router-{mode.value}"
        pools = {"--prefill": f"{prefill.url}={prefill.control}", "--decode": decode.url}
        words = [word for pair in pools.items() for word in pair]
        command = (sys.executable, "-m", "kvx", "router", "--port", str(port), "--mode", mode.value, *words)
        child = self.cluster.start(name, Launch(command, {}, "/health"), url)
        return Instance(child, Server(self.model, port), "", Path(), {})

    def restart(self, name: str) -> Instance:
        """Start a server again, at the same ports, after its process is gone."""
        instance = self.instances[name]
        self.cluster.stop(instance.child)
        instance.child = self._launch(name, instance.server, instance.env)
        self.cluster.wait_ready(instance.child, timeout_s=480)
        return instance

    def _launch(self, name: str, server: Server, env: Mapping[str, str]) -> Child:
        launch = VllmDriver().launch(server)
        launch = evolve(launch, env={**launch.env, **env})
        return self.cluster.start(name, launch, f"http://{server.host}:{server.port}")

    def serve(
        self,
        prefill: Instance,
        decode: Instance,
        body: Mapping[str, Any],
        mode: Mode,
        *,
        transfer: str = "",
        decode_delay_s: float = 0.0,
        prefill_delay_s: float = 0.0,
    ) -> Served:
        """One request as a router does it: pull in turn, push both at once (or with a delay of one leg)."""
        transfer = transfer or secrets.token_hex(8)
        if mode is Mode.PULL:
            first = prefill.post(self.dialect.prefill_leg(body, mode, transfer))
            leg = self.dialect.decode_leg(body, mode, transfer, prefill_answer=first.body)
            return Served(first, decode.post(leg))

        def later(instance: Instance, leg: Mapping[str, Any], delay_s: float) -> Answer:
            time.sleep(delay_s)
            return instance.post(leg)

        with ThreadPoolExecutor(2) as pool:
            leg = self.dialect.decode_leg(body, mode, transfer, prefill_address=prefill.control)
            second = pool.submit(later, decode, leg, decode_delay_s)
            leg = self.dialect.prefill_leg(body, mode, transfer)
            first = pool.submit(later, prefill, leg, prefill_delay_s).result()
            return Served(first, second.result())


@define(eq=False)
class Gate:
    """Requests of a soak pass while every server is up, and a few more while one is down."""

    _up: threading.Event = field(factory=threading.Event)
    _lock: Any = field(factory=threading.Lock)
    _allowance: int = 0

    def open(self) -> None:
        self._up.set()

    def shut(self, allowance: int) -> None:
        """Let only so many more pass."""
        with self._lock:
            self._allowance = allowance
        self._up.clear()

    def wait(self) -> None:
        """Until a request may pass, at most ten minutes."""
        if self._up.is_set():
            return
        with self._lock:
            self._allowance -= 1
            passes = self._allowance >= 0
        if not passes:
            self._up.wait(600)


def _ports_in_a_row(count: int) -> int:
    """The first of so many free ports: rank i listens on the control port plus i."""
    for _ in range(100):
        (first,) = free_ports(1)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError(f"no {count} free ports in a row")


def _mutated(options: Mapping[str, Any]) -> tuple[str, str]:
    config = {
        "kv_connector": MUTANT,
        "kv_connector_module_path": "mutants",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    return "--kv-transfer-config", json.dumps(config)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A tiny model of a family of `kvx_vllm.tiny_model`: its folder."""

    def make(family: str) -> str:
        folder = str(tmp_path_factory.mktemp(family))
        subprocess.run((sys.executable, "-m", "kvx_vllm.tiny_model", folder, "0", family), check=True, timeout=300)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[[str], str]) -> str:
    return make_model("full")


@pytest.fixture(scope="module")
def bench(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Cluster(tmp_path_factory.mktemp("servers")) as cluster:
        yield Bench(cluster, tiny_model)


@pytest.fixture(autouse=True)
def _servers_are_alive(bench: Bench) -> Iterator[None]:
    yield
    bench.cluster.check()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="session")
def keep() -> Callable[[str, Any], None]:
    """Keep what a test has measured: in folder EVIDENCE, if that is set."""

    def write(name: str, data: Any) -> None:
        print(f"{name}: {json.dumps(data)[:2000]}")
        if folder := os.environ.get("EVIDENCE"):
            Path(folder).joinpath(f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")

    return write
