"""Multi-head latent attention, as DeepSeek has it: every rank holds the same latent, so one of them sends it.

vLLM's backend for CPUs has blocks of 16 tokens, no prefix cache and no chunks for such a model. Its own rotary
operation takes keys that lie apart for contiguous ones, so a prefill's second token is already another than in
decoding: a single server contradicts itself. PyTorch's operations are used here instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]
LENGTHS = [2, 15, 16, 17, 33, 100, 700]
BLOCK, POOL = 16, 200
BLOCK_BYTES = 4 * BLOCK * 576 * 4
"""Four layers, each of one latent of 576 float32 for a token."""


@frozen
class Servers:
    """`two` has two ranks. `one` and `other` have one each, and lose what they move while `switch` is there."""

    one: Any
    other: Any
    two: Any
    switch: Path

    def dropping(self, on: bool) -> None:
        for name in ("one", "other"):
            path = self.switch / f"{name}.drop"
            path.touch() if on else path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def tiny_model(make_model: Callable[[str], str]) -> str:
    return make_model("latent")


@pytest.fixture(scope="module")
def servers(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    switch = tmp_path_factory.mktemp("switches")
    room = ("--kv-cache-memory-bytes", str((POOL + 1) * BLOCK_BYTES))
    given = (*room, "--compilation-config", '{"custom_ops": ["none"]}')
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))

    def start(name: str, ranks: int = 1) -> Any:
        transport = {"transports": ["switch:switch"], "switch:switch": {"switch": str(switch / name)}}
        return bench.start(name, *given, env={"PYTHONPATH": path}, ranks=ranks, **transport)

    made = Servers(start("one"), start("other"), start("two", ranks=2), switch)
    bench.cluster.wait_ready(timeout_s=900)
    # The first forward of two ranks takes longer than a transfer waits here: it is had before there are any.
    for instance in (made.one, made.other, made.two):
        assert instance.post(bench.completion([3, 4, 5])).status == 200
    yield made
    for instance in (made.one, made.other, made.two):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def pools_are_full(bench: Any, *instances: Any) -> bool:
    def full() -> bool:
        told = [instance.blocks() for instance in instances]
        return all(one["free"] == one["total"] and one["held"] == 0 for one in told)

    return bool(bench.until(full, 20))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_single_vllm_and_others_without_the_moved_bytes(
    bench: Any, servers: Servers, keep: Any, mode: Mode
) -> None:
    rows = []
    work = [bench.completion(prompt) for prompt in bench.prompts(91 + MODES.index(mode), LENGTHS)]
    servers.dropping(on=True)
    try:
        # With a pool that nobody has used, and no prefix cache, what is not moved is not there.
        without = [bench.serve(servers.one, servers.other, body, mode).decode for body in work]
    finally:
        servers.dropping(on=False)
    for body, control in zip(work, without, strict=True):
        served = bench.serve(servers.one, servers.other, body, mode)
        wanted = servers.one.post(body).tokens
        row = {"tokens": len(body["prompt"]), "equal": served.decode.tokens == wanted, **served.decode.kvx}
        rows.append({**row, "control_equal": control.tokens == wanted, "control_ok": control.kvx["ok"]})
    keep(f"vllm_mla_{mode.value}", rows)
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * len(LENGTHS)
    assert [(row["control_equal"], row["control_ok"]) for row in rows] == [(False, True)] * len(LENGTHS)
    assert [row["bytes"] for row in rows] == [blocks(row["tokens"]) * BLOCK_BYTES for row in rows]
    assert pools_are_full(bench, servers.one, servers.other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", ["two to one", "one to two"])
def test_one_latent_goes_to_each_rank_and_every_rank_is_released(
    bench: Any, servers: Servers, keep: Any, direction: str, mode: Mode
) -> None:
    """Of two ranks that hold the same, one sends; the other moves nothing, and its blocks are free as soon."""
    two_send = direction == "two to one"
    prefill, decode = (servers.two, servers.one) if two_send else (servers.one, servers.two)
    before = prefill.probe()["counters"]
    rows = []
    for prompt in bench.prompts(93 + 2 * MODES.index(mode) + two_send, LENGTHS):
        body = bench.completion(prompt)
        served = bench.serve(prefill, decode, body, mode)
        row = {"tokens": len(prompt), "equal": served.decode.tokens == servers.one.post(body).tokens}
        rows.append({**row, **served.decode.kvx})
    keep(f"vllm_mla_{direction.replace(' ', '_')}_{mode.value}", rows)
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * len(LENGTHS)
    copies = 1 if two_send else 2
    assert [row["bytes"] for row in rows] == [copies * blocks(row["tokens"]) * BLOCK_BYTES for row in rows]
    assert pools_are_full(bench, prefill, decode)
    # A rank that only waited for its lease to end would have made the transfer fail at the producer.
    after = prefill.probe()["counters"]
    assert after["producer_ok"] - before.get("producer_ok", 0) == len(LENGTHS)
    assert after.get("producer_failed", 0) == before.get("producer_failed", 0)
