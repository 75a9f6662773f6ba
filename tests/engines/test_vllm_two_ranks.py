"""Tensor parallelism of two on both sides: each rank moves its half of the heads to its like. Other servers than those
of unequal ranks, so a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from attrs import frozen

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]
LENGTHS = [2, 31, 33, 100, 700]


@frozen
class Servers:
    """`single` is a vLLM of one rank without kvx."""

    prefill: Any
    decode: Any
    single: Any


@pytest.fixture(scope="module")
def servers(bench: Any) -> Iterator[Servers]:
    made = Servers(bench.start("prefill", ranks=2), bench.start("decode", ranks=2), bench.start_single("single"))
    bench.cluster.wait_ready(timeout_s=900)
    # The first forward of two ranks takes longer than a transfer waits here: it is had before there are any.
    for instance in (made.prefill, made.decode):
        assert instance.post(bench.completion([3, 4, 5])).status == 200
    yield made
    for instance in (made.prefill, made.decode):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_bytes_between_two_ranks_and_two(bench: Any, servers: Servers, keep: Any, mode: Mode) -> None:
    rows = []
    for prompt in bench.prompts(81 + MODES.index(mode), LENGTHS):
        body = bench.completion(prompt)
        served = bench.serve(servers.prefill, servers.decode, body, mode)
        equal = served.decode.tokens == servers.single.post(body).tokens
        rows.append({"tokens": len(prompt), "equal": equal, **served.decode.kvx})
    keep(f"vllm_ranks_two_to_two_{mode.value}", rows)
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * len(LENGTHS)
    assert [row["bytes"] for row in rows] == [bench.moved(row["tokens"]) for row in rows]

    def pools_are_full() -> bool:
        told = [instance.blocks() for instance in (servers.prefill, servers.decode)]
        return all(one["free"] == one["total"] and one["held"] == 0 for one in told)

    assert bench.until(pools_are_full, 20)
