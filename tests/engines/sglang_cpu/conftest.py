"""Real SGLang servers on a CPU: one cluster for all tests of a session, since each start is dear."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field, frozen

from kvx.cluster import Child, Cluster
from kvx.core.model import Mode, Role
from kvx.driver import Server
from kvx.operator import ask
from kvx_conformance.suite.servers import SHORT, until
from kvx_sglang.driver import SglangDriver

PAGE = 16
PAGE_BYTES = 6 * PAGE * 4 * 16 * 4
"""Keys and values of three layers, four heads of 16 float32 each."""
START_S = 900.0
RANKS = 2
"""Most ranks of a server."""
SWITCH, DROPPING = "switch:switch", "kvx_conformance.faults:dropping"
OPTIONS = {**SHORT, "max_held_fraction": 1.0}
"""Short bounds, and a pool all of which may be held for transfers."""
ENV = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", ""))),
}


@frozen
class Answer:
    """What a server said, and how long that took, seconds."""

    status: int
    body: dict[str, Any]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens

    @property
    def text(self) -> str:
        """A failure as the client sees it."""
        return json.dumps(self.body)


@define
class Instance:
    """A running server and what a test may do to it."""

    child: Child
    server: Server
    control: str
    meeting: str
    events: Path
    env: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, limit_s: float = 120.0) -> Answer:
        started = time.monotonic()
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=limit_s)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        try:
            told = json.loads(data)
        except ValueError:
            told = {"text": data.decode(errors="replace")}
        return Answer(response.status, told, time.monotonic() - started)

    def post(self, body: Mapping[str, Any], limit_s: float = 120.0) -> Answer:
        return self.ask("POST", "/v1/completions", body, limit_s)

    def abort(self, rid: str) -> None:
        self.ask("POST", "/abort_request", {"rid": rid})

    def leave(self, body: Mapping[str, Any], after_s: float) -> None:
        """A client that closes its connection after a while."""
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"content-type": "application/json"}
            )
            time.sleep(after_s)

    def loads(self) -> dict[str, Any]:
        """What SGLang says of its queues and its pool."""
        (told,) = self.ask("GET", "/v1/loads?include=all").body["loads"]
        return {
            "used_tokens": told["num_used_tokens"],
            "running": told["num_running_reqs"],
            "waiting": told["num_waiting_reqs"],
            **told.get("disaggregation", {}),
        }

    def status(self) -> dict[str, Any]:
        """The endpoint's own view, through the control channel."""
        body: dict[str, Any] = json.loads(ask(self.control, "status", secret=b"", timeout_s=10).body)
        return body

    def outcomes(self) -> list[dict[str, Any]]:
        """The event log."""
        return [json.loads(line) for line in self.events.read_text().splitlines()] if self.events.exists() else []

    def log(self) -> str:
        return self.child.log.read_text(errors="replace")


@frozen
class Served:
    prefill: Answer
    decode: Answer


@define
class Bench:
    """Starts servers of one cluster, and sends requests through two of them."""

    cluster: Cluster
    model: str
    switches: Path
    instances: dict[str, Instance] = field(factory=dict)
    driver: SglangDriver = field(factory=SglangDriver)

    @staticmethod
    def completion(prompt: list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
        fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**fixed, "prompt": prompt, "max_tokens": tokens, **more}

    @staticmethod
    def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
        draw = random.Random(seed)  # noqa: S311
        return [[draw.randrange(4, 512) for _ in range(length)] for length in lengths]

    until = staticmethod(until)

    def start(
        self, name: str, role: Role | None, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> Instance:
        """Start a server without waiting for it; without a role it is SGLang alone."""
        port, control, meeting = _ports(3)
        events = self.cluster.logs / f"{name}.events.jsonl"
        own = {"listen": f"127.0.0.1:{control}", "event_log": str(events), **options}
        server = Server(
            self.model,
            port,
            options={**OPTIONS, **own} if role else None,
            arguments=(*self.driver.small_model("").arguments, "--served-model-name", "tiny", *arguments),
            role=role,
            meeting_port=meeting,
        )
        told = {**ENV, **(env or {})}
        control_address, meeting_address = f"127.0.0.1:{control}", f"127.0.0.1:{meeting}"
        child = self._launch(name, server, told)
        self.instances[name] = Instance(child, server, control_address, meeting_address, events, told)
        return self.instances[name]

    def restart(self, name: str) -> None:
        """Start a server again, at the same ports, after its process is gone."""
        instance = self.instances[name]
        self.cluster.stop(instance.child)
        instance.child = self._launch(name, instance.server, instance.env)
        self.cluster.wait_ready(instance.child, timeout_s=START_S)

    def stop(self, name: str) -> None:
        self.cluster.stop(self.instances.pop(name).child)

    def _launch(self, name: str, server: Server, env: Mapping[str, str]) -> Child:
        launch = self.driver.launch(server)
        launch = evolve(launch, env={**launch.env, **env})
        return self.cluster.start(name, launch, f"http://{server.host}:{server.port}")

    def legs(self, prefill: Instance, body: Mapping[str, Any], transfer: str = "") -> list[dict[str, Any]]:
        """The bodies of both legs."""
        transfer = transfer or secrets.token_hex(16)
        dialect = self.driver.dialect
        return [
            dialect.prefill_leg(body, Mode.PUSH, transfer, prefill_address=prefill.meeting),
            dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=prefill.meeting),
        ]

    def serve(self, prefill: Instance, decode: Instance, body: Mapping[str, Any], limit_s: float = 120.0) -> Served:
        """One request as a router does it: both legs at once."""
        with ThreadPoolExecutor(2) as pool:
            first, second = self.send(pool, prefill, decode, body, limit_s)
            return Served(first.result(), second.result())

    def send(
        self,
        pool: ThreadPoolExecutor,
        prefill: Instance,
        decode: Instance,
        body: Mapping[str, Any],
        limit_s: float = 120.0,
    ) -> tuple[Future[Answer], Future[Answer]]:
        """The same without waiting for the answers."""
        first, second = self.legs(prefill, body)
        return pool.submit(prefill.post, first, limit_s), pool.submit(decode.post, second, limit_s)

    def turn(self, what: str, *, on: bool) -> None:
        """A switch of every server's transport (see tests/engines/switch.py)."""
        path = Path(f"{self.switches}.{what}")
        if on:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def decode_options(self) -> dict[str, Any]:
        """Of a server whose transport has the switches."""
        return {"transports": [SWITCH], SWITCH: {"switch": str(self.switches)}}

    def control_options(self) -> dict[str, Any]:
        """Of a decode server to which no byte of KV cache comes."""
        return {"transports": [DROPPING], DROPPING: {"regions": self.driver.small_model("").cache_regions}}

    def prefill_options(self) -> dict[str, Any]:
        """Of a server that can push to both."""
        return {**self.decode_options(), **self.control_options(), "transports": [SWITCH, DROPPING]}


_PORTS = iter(random.sample(range(12000, 32000, RANKS), 20000 // RANKS))
"""Each is drawn once; below those that the system gives to whoever asks, since a start takes long."""


def _ports(count: int) -> list[int]:
    """Ports that are free, as the next ones are, on which further ranks listen."""
    found: list[int] = []
    while len(found) < count:
        port = next(_PORTS)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for own in range(port, port + RANKS):
                held.enter_context(socket.socket()).bind(("127.0.0.1", own))
            found.append(port)
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run((sys.executable, "-m", "kvx_sglang.tiny_model", str(folder)), check=True, timeout=300)
    return str(folder)


@pytest.fixture(scope="session")
def bench(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Cluster(tmp_path_factory.mktemp("servers")) as cluster:
        yield Bench(cluster, tiny_model, tmp_path_factory.mktemp("switches") / "all")


@define
class Pair:
    """The servers of most tests: SGLang alone, prefill, decode, and a decode server without KV bytes."""

    single: Instance
    prefill: Instance
    decode: Instance
    control: Instance

    def idle(self) -> bool:
        """Nothing is open, and every page is free or evictable."""
        both = (self.prefill, self.decode)
        return all(
            not one.status()["open"] and not any(value for value in one.loads().values() if isinstance(value, int))
            for one in both
        )


@pytest.fixture(scope="session")
def pair(bench: Bench) -> Pair:
    radix, chunks = "--disaggregation-decode-enable-radix-cache", ("--chunked-prefill-size", "64")
    pair = Pair(
        bench.start("single", None),
        bench.start("prefill", Role.PRODUCER, *chunks, "--enable-metrics", **bench.prefill_options()),
        bench.start("decode", Role.CONSUMER, radix, **bench.decode_options()),
        bench.start("control", Role.CONSUMER, **bench.control_options()),
    )
    bench.cluster.wait_ready(timeout_s=START_S)
    return pair
