"""Servers on which NIXL works beside one where it does not load and one that it cannot reach: what an operator sees."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvx.cluster import Child, Cluster, free_ports
from kvx.core.model import Mode
from kvx.driver import Server
from kvx_reference.driver import ReferenceDriver

pytestmark = pytest.mark.timeout(300)
DRIVER = ReferenceDriver()
DIALECT = DRIVER.dialect
PROMPT = list(range(100, 200))
BLOCK_BYTES = 4 * 16 * 4 * 64 * 4
"""Four layers, 16 tokens, 4 heads, keys and values of 32 float32 each."""
MOVED = 7 * BLOCK_BYTES


@frozen
class Node:
    child: Child
    control: str

    def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.child.url}/v1/completions", data, timeout=60) as answer:  # noqa: S310
            return dict(json.load(answer))

    def log(self) -> str:
        return self.child.log.read_text()

    def _kvx_status(self, *words: str) -> str:
        command = [sys.executable, "-m", "kvx", "status", self.control, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    def transports(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads(self._kvx_status())["transports"]
        return found

    def metric(self, name: str, transport: str) -> float:
        start = f'kvx_transport_{name}{{rank="{self.control}",transport="{transport}"}} '
        (line,) = [line for line in self._kvx_status("--metrics").splitlines() if line.startswith(start)]
        return float(line.removeprefix(start))


class Pool:
    """Servers of one small model."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._small = DRIVER.small_model(str(folder))
        subprocess.run(self._small.make, check=True, timeout=60)
        self._folder = folder

    def start(self, name: str, transport: str, section: Mapping[str, Any]) -> Node:
        port, control = free_ports(2)
        listen = f"127.0.0.1:{control}"
        options = {"listen": listen, "transports": [transport, "tcp"], transport: section}
        server = Server(str(self._folder), port, options=options, arguments=self._small.arguments)
        return Node(self._cluster.start(name, DRIVER.launch(server), f"http://127.0.0.1:{port}"), listen)

    def wait_ready(self) -> None:
        self._cluster.wait_ready()


@pytest.fixture
def pool(private_network: Any, tmp_path: Path) -> Iterator[Pool]:
    with Cluster(tmp_path / "logs") as cluster:
        yield Pool(cluster, tmp_path / "model")
        cluster.check()


def serve(prefill: Node, decode: Node, prompt: list[int], mode: Mode) -> None:
    """One request as a router does it; its transfer has to bring all bytes."""
    fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {**fixed, "prompt": prompt, "max_tokens": 4}
    transfer = secrets.token_hex(8)
    first = DIALECT.prefill_leg(body, mode, transfer)
    if mode is Mode.PULL:
        answer = decode.post(DIALECT.decode_leg(body, mode, transfer, prefill_answer=prefill.post(first)))
    else:
        with ThreadPoolExecutor(1) as threads:
            leg = DIALECT.decode_leg(body, mode, transfer, prefill_address=prefill.control)
            decoded = threads.submit(decode.post, leg)
            prefill.post(first)
            answer = decoded.result()
    told = answer["kv_transfer_params"]["kvx"]
    assert (told["ok"], told["bytes"], told["computed_tokens"]) == (True, MOVED, 1), told


def fresh(number: int) -> list[int]:
    """A prompt of seven blocks of which no server has any."""
    return [number + 3, *PROMPT]


def test_tcp_does_what_nixl_cannot_and_an_operator_sees_it(pool: Pool, sections: Any, name: str) -> None:
    (nobody,) = free_ports(1)
    prefill = pool.start("prefill", name, sections[name])
    deaf = pool.start("deaf", name, {**sections[name], "preload": ["/nowhere/libnothing.so"]})
    hidden = pool.start("hidden", name, {**sections[name], "advertise_port": nobody})
    pool.wait_ready()

    # NIXL does not load at one side: neither direction tries it.
    serve(prefill, deaf, fresh(0), Mode.PUSH)
    serve(prefill, deaf, fresh(1), Mode.PULL)
    told = deaf.transports()
    assert list(told[name]) == ["left_out"]
    assert told[name]["left_out"].startswith("NIXL cannot be used here")
    assert told["tcp"]["bytes"] == prefill.transports()["tcp"]["bytes"] == MOVED
    assert (deaf.metric("left_out", name), deaf.metric("left_out", "tcp")) == (1, 0)
    assert f"transport '{name}' is left out: NIXL cannot be used here" in deaf.log()
    assert prefill.transports()[name]["fallbacks"] == 0

    # NIXL is on both sides, and nobody answers where one of them says that it is met: who tries it falls back.
    serve(prefill, hidden, fresh(2), Mode.PUSH)
    told = prefill.transports()
    assert told[name]["fallbacks"] == 1
    assert told[name]["bytes"] == 0
    assert told[name]["last_fallback"].startswith(f"{hidden.control}#0: ")
    assert told["tcp"]["bytes"] == 2 * MOVED
    assert sorted(told["tcp"]["peers"]) == sorted(f"{one.control}#0" for one in (deaf, hidden))
    assert (prefill.metric("fallbacks_total", name), prefill.metric("bytes_total", "tcp")) == (1, 2 * MOVED)
    assert f"transport '{name}' does not serve {hidden.control}#0" in prefill.log()

    # The way back is open.
    serve(prefill, hidden, fresh(3), Mode.PULL)
    assert hidden.metric("bytes_total", name) == MOVED
    assert hidden.metric("fallbacks_total", name) == 0
