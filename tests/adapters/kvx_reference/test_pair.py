"""Two real processes and kvx_tcp between them: the tokens of a single instance, and no block is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from kvx.cluster import Child, Cluster, free_ports
from kvx.core.model import Mode
from kvx.driver import Server
from kvx_reference.driver import ReferenceDriver

pytestmark = pytest.mark.timeout(180)

DRIVER = ReferenceDriver()
DIALECT = DRIVER.dialect
LENGTHS = [1, 2, 15, 16, 17, 32, 33, 100, 300, 700]
BLOCK_BYTES = 4 * 16 * 4 * 64 * 4
"""Four layers, 16 tokens, 4 heads, keys and values of 32 float32 each."""


@define(eq=False)
class Instance:
    child: Child
    port: int
    control: str

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            content = json.loads(answer.read())
            assert answer.status == 200, content
            return dict(content)

    def abandon(self, body: Mapping[str, Any], after_s: float) -> None:
        """Send a request and leave."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            time.sleep(after_s)

    def probe(self) -> dict[str, Any]:
        return dict(self.post(DIALECT.probe_request("tiny"))["kv_transfer_params"]["kvx"])

    def is_idle(self) -> bool:
        probe = self.probe()
        return probe["open"] == 0 and probe["blocks"] == {
            **probe["blocks"],
            "free": probe["blocks"]["total"],
            "held": 0,
        }


@define(eq=False)
class Pair:
    prefill: Instance
    decode: Instance

    def serve(self, body: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
        """One request as a router does it."""
        transfer = secrets.token_hex(8)
        if mode is Mode.PULL:
            told = self.prefill.post(DIALECT.prefill_leg(body, mode, transfer))
            return self.decode.post(DIALECT.decode_leg(body, mode, transfer, prefill_answer=told))
        with ThreadPoolExecutor(1) as pool:
            leg = DIALECT.decode_leg(body, mode, transfer, prefill_address=self.prefill.control)
            decoded = pool.submit(self.decode.post, leg)
            self.prefill.post(DIALECT.prefill_leg(body, mode, transfer))
            return decoded.result()

    def settle(self, limit_s: float = 80.0) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.prefill.is_idle() and self.decode.is_idle():
                return True
            time.sleep(0.1)
        return False


def completion(prompt: list[int], tokens: int = 16) -> dict[str, Any]:
    fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "prompt": prompt, "max_tokens": tokens}


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)  # noqa: S311
    return [[draw.randrange(3, 2000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("servers")) as cluster:
        yield cluster
        cluster.check()


def start(cluster: Cluster, folder: Path, *arguments: str, **options: Any) -> Pair:
    small = DRIVER.small_model(str(folder))
    if not folder.exists():
        subprocess.run(small.make, check=True, timeout=60)
    instances = []
    for role in ("prefill", "decode"):
        port, control = free_ports(2)
        given = {"listen": f"127.0.0.1:{control}", **options}
        server = Server(str(folder), port, options=given, arguments=(*small.arguments, *arguments))
        name = f"{role}-{port}"
        child = cluster.start(name, DRIVER.launch(server), f"http://127.0.0.1:{port}")
        instances.append(Instance(child, port, given["listen"]))
    cluster.wait_ready()
    return Pair(*instances)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.fixture(scope="module")
def pair(cluster: Cluster, folder: Path) -> Pair:
    return start(cluster, folder, "--blocks", "640", max_held_fraction=1.0)


@pytest.mark.parametrize("mode", Mode)
def test_tokens_are_those_of_a_single_instance(pair: Pair, mode: Mode) -> None:
    rows = []
    for prompt in prompts(1 if mode is Mode.PUSH else 2, LENGTHS):
        served = pair.serve(completion(prompt), mode)
        told = served["kv_transfer_params"]["kvx"]
        equal = tokens_of(served) == tokens_of(pair.prefill.post(completion(prompt)))
        rows.append((len(prompt), equal, told["ok"], told["bytes"], told["computed_tokens"]))
    assert rows == [(length, True, True, -(-length // 16) * BLOCK_BYTES, 1) for length in LENGTHS]
    assert pair.settle()


def test_the_second_turn_asks_for_what_is_new(pair: Pair) -> None:
    """The decode instance has the first turn's blocks, so only the rest is moved."""
    (prompt,) = prompts(3, [96])
    first = tokens_of(pair.serve(completion(prompt, 16), Mode.PULL))
    longer = [*prompt, *first, 5, 6, 7]
    for mode in Mode:
        served = pair.serve(completion(longer), mode)
        told = served["kv_transfer_params"]["kvx"]
        assert tokens_of(served) == tokens_of(pair.prefill.post(completion(longer)))
        assert told["ok"] is True
        assert told["computed_tokens"] <= 16
        assert told["bytes"] == (2 if mode is Mode.PUSH else 1) * BLOCK_BYTES


@pytest.mark.parametrize("mode", Mode)
def test_legs_of_different_prompts_move_no_byte(pair: Pair, mode: Mode) -> None:
    one, other = prompts(17 if mode is Mode.PUSH else 19, [100, 100])
    transfer = secrets.token_hex(8)
    prefill_leg = DIALECT.prefill_leg(completion(one), mode, transfer)
    if mode is Mode.PULL:
        told = pair.prefill.post(prefill_leg)
        answer = pair.decode.post(DIALECT.decode_leg(completion(other), mode, transfer, prefill_answer=told))
    else:
        leg = DIALECT.decode_leg(completion(other), mode, transfer, prefill_address=pair.prefill.control)
        with ThreadPoolExecutor(1) as pool:
            decoded = pool.submit(pair.decode.post, leg)
            pair.prefill.post(prefill_leg)
            answer = decoded.result()
    kvx = answer["kv_transfer_params"]["kvx"]
    assert (kvx["ok"], kvx["reason"], kvx["computed_tokens"]) == (False, "prompt", 100)
    assert tokens_of(answer) == tokens_of(pair.decode.post(completion(other)))
    assert pair.settle()


def test_a_push_brings_the_tokens_that_the_producer_has(pair: Pair) -> None:
    (prompt,) = prompts(18, [100])
    transfer = secrets.token_hex(8)
    leg = DIALECT.decode_leg(completion(prompt), Mode.PUSH, transfer, prefill_address=pair.prefill.control)
    leg["kv_transfer_params"]["kvx"]["tokens"] = 70
    with ThreadPoolExecutor(1) as pool:
        decoded = pool.submit(pair.decode.post, leg)
        pair.prefill.post(DIALECT.prefill_leg(completion(prompt[:70]), Mode.PUSH, transfer))
        answer = decoded.result()
    kvx = answer["kv_transfer_params"]["kvx"]
    assert (kvx["ok"], kvx["bytes"], kvx["computed_tokens"]) == (True, 5 * BLOCK_BYTES, 30)
    assert tokens_of(answer) == tokens_of(pair.prefill.post(completion(prompt)))
    assert pair.settle()


def test_a_control_whose_bytes_are_dropped_gives_other_tokens(cluster: Cluster, folder: Path) -> None:
    dropping = start(cluster, folder, transports=["kvx_conformance.faults:dropping"])
    equal = []
    for mode in Mode:
        for prompt in prompts(4 if mode is Mode.PUSH else 5, [40, 100, 300]):
            served = dropping.serve(completion(prompt), mode)
            assert served["kv_transfer_params"]["kvx"]["ok"] is True
            equal.append(tokens_of(served) == tokens_of(dropping.prefill.post(completion(prompt))))
    assert equal == [False] * 6
    cluster.stop(dropping.prefill.child, dropping.decode.child)


def test_forty_at_once_some_of_which_leave(pair: Pair) -> None:
    draw = random.Random(6)  # noqa: S311
    work = prompts(7, [draw.choice([5, 16, 40, 90, 200, 350]) for _ in range(40)])
    fates = ["push", "pull", "push leaves", "pull leaves", "prefill leaves", "push", "pull", "push"] * 5

    def play(prompt: list[int], fate: str, after_s: float) -> list[int] | None:
        body, transfer = completion(prompt, 8), secrets.token_hex(8)
        if fate in ("push", "pull"):
            served = pair.serve(body, Mode(fate))
            assert served["kv_transfer_params"]["kvx"]["ok"] is True
            return tokens_of(served)
        if fate == "pull leaves":
            told = pair.prefill.post(DIALECT.prefill_leg(body, Mode.PULL, transfer))
            pair.decode.abandon(DIALECT.decode_leg(body, Mode.PULL, transfer, prefill_answer=told), after_s)
            return None
        decode_leg = DIALECT.decode_leg(body, Mode.PUSH, transfer, prefill_address=pair.prefill.control)
        prefill_leg = DIALECT.prefill_leg(body, Mode.PUSH, transfer)
        with ThreadPoolExecutor(1) as pool:
            if fate == "push leaves":
                pool.submit(pair.decode.abandon, decode_leg, after_s)
                pair.prefill.post(prefill_leg)
                return None
            decoded = pool.submit(pair.decode.post, decode_leg)
            pair.prefill.abandon(prefill_leg, after_s)
            return tokens_of(decoded.result())  # whatever became of the transfer

    waits = [draw.choice([0.0, 0.01, 0.05, 0.2]) for _ in work]
    with ThreadPoolExecutor(8) as pool:
        served = list(pool.map(play, work, fates, waits))
    assert sum(tokens is not None for tokens in served) == 30
    wrong = [
        at
        for at, (prompt, tokens) in enumerate(zip(work, served, strict=True))
        if tokens is not None and tokens != tokens_of(pair.prefill.post(completion(prompt, 8)))
    ]
    assert wrong == []
    assert pair.settle()
