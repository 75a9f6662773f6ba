"""Speculative decoding with the same draft model on both sides: the draft's keys and values move with the others.

Wrong ones would not change a token, only how many of the draft's are taken. So the draft here is the model itself, of
whose tokens all are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]
LENGTHS = [2, 32, 33, 100, 300]
LAYERS = 2
"""How many times the layers of one model."""


@pytest.fixture(scope="module")
def pair(bench: Any, tiny_model: str) -> Iterator[tuple[Any, Any]]:
    draft = {"method": "draft_model", "model": tiny_model, "num_speculative_tokens": 2}
    room = ("--kv-cache-memory-bytes", str(65 * LAYERS * bench.moved(1)))
    given = (*room, "--speculative-config", json.dumps(draft))
    made = bench.start("prefill", *given), bench.start("decode", *given)
    bench.cluster.wait_ready(timeout_s=480)
    yield made
    for instance in made:
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


def drafted(instance: Any) -> tuple[float, float]:
    """How many tokens the draft has proposed, and how many of them were taken."""
    told = instance.metrics()
    return tuple(told[f"vllm:spec_decode_num_{what}_tokens_total{{}}"] for what in ("draft", "accepted"))


@pytest.mark.parametrize("mode", MODES)
def test_the_drafts_cache_comes_too(bench: Any, pair: tuple[Any, Any], keep: Any, mode: Mode) -> None:
    prefill, decode = pair
    rows = []
    before = drafted(decode)
    for prompt in bench.prompts(111 + MODES.index(mode), LENGTHS):
        body = bench.completion(prompt, 16)
        served = bench.serve(prefill, decode, body, mode)
        row = {"tokens": len(prompt), "equal": served.decode.tokens == prefill.post(body).tokens}
        rows.append({**row, **served.decode.kvx})
    proposed, taken = (after - start for after, start in zip(drafted(decode), before, strict=True))
    keep(f"vllm_draft_{mode.value}", {"requests": rows, "proposed": proposed, "taken": taken})
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * len(LENGTHS)
    assert [row["bytes"] for row in rows] == [LAYERS * bench.moved(row["tokens"]) for row in rows]
    assert taken > proposed / 2 > 0
