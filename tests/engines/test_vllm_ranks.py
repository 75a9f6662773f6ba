"""Instances of unequal numbers of ranks: tensor parallelism of two on one side, none on the other, both directions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from attrs import frozen

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]


@frozen
class Ranks:
    """`two` has two ranks with half of the heads each; `single` is a vLLM without kvx."""

    two: Any
    one: Any
    single: Any

    def pair(self, direction: str) -> tuple[Any, Any]:
        """Who prefills, who decodes."""
        return (self.two, self.one) if direction == "two to one" else (self.one, self.two)


@pytest.fixture(scope="module")
def ranks(bench: Any) -> Iterator[Ranks]:
    two = bench.start("two", ranks=2)
    made = Ranks(two, bench.start("one"), bench.start_single("single"))
    bench.cluster.wait_ready(timeout_s=900)
    yield made
    for instance in (made.two, made.one):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


def both_pools_are_full(bench: Any, ranks: Ranks) -> bool:
    """In the same memory two ranks have twice as many blocks, of half the size."""

    def full() -> bool:
        told = [instance.blocks() for instance in (ranks.two, ranks.one)]
        return all(one["free"] == one["total"] and one["held"] == 0 for one in told)

    return bool(bench.until(full, 20))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", ["two to one", "one to two"])
def test_tokens_and_bytes_between_unequal_ranks(
    bench: Any, ranks: Ranks, keep: Any, direction: str, mode: Mode
) -> None:
    prefill, decode = ranks.pair(direction)
    rows = []
    for prompt in bench.prompts(61 + 2 * MODES.index(mode) + (direction == "two to one"), [2, 33, 100, 700]):
        body = bench.completion(prompt)
        served = bench.serve(prefill, decode, body, mode)
        equal = served.decode.tokens == ranks.single.post(body).tokens
        rows.append({"tokens": len(prompt), "equal": equal, **served.decode.kvx})
    keep(f"vllm_ranks_{direction.replace(' ', '_')}_{mode.value}", rows)
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * 4
    assert [row["bytes"] for row in rows] == [bench.moved(row["tokens"]) for row in rows]
    assert both_pools_are_full(bench, ranks)


@pytest.mark.parametrize("direction", ["two to one", "one to two"])
def test_a_failure_is_one_for_all_ranks(bench: Any, ranks: Ranks, direction: str) -> None:
    """Another prompt at the consumer: it computes by itself, and every rank of either side lets its blocks go."""
    prefill, decode = ranks.pair(direction)
    one, other = bench.prompts(71, [300, 300])
    transfer = "differs " + direction
    with ThreadPoolExecutor(2) as pool:
        leg = bench.dialect.decode_leg(bench.completion(other), Mode.PUSH, transfer, prefill_address=prefill.control)
        answer = pool.submit(decode.post, leg)
        prefill.post(bench.dialect.prefill_leg(bench.completion(one), Mode.PUSH, transfer))
        told = answer.result()
    assert told.tokens == ranks.single.post(bench.completion(other)).tokens
    assert (told.kvx["ok"], told.kvx["computed_tokens"]) == (False, 300)
    assert both_pools_are_full(bench, ranks)
