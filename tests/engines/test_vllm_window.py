"""Models with a sliding window: in every layer, and in every other one beside full attention.

vLLM's hybrid manager keeps what a window shows, and has its null block in the place of the rest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]
BLOCK, WINDOW, LAYERS = 32, 64, 4
LAYER_BYTES = 4 * BLOCK * 64 * 4
"""Of a block: four heads, keys and values of 32 float32 each."""
# Before, at and behind the places where the window begins with a block, for the last token and for the next one.
LENGTHS = [2, 33, 63, 64, 65, 94, 95, 96, 97, 128, 300, 319, 320, 321, 700]


@frozen
class Case:
    """A model of `kvx_vllm.tiny_model`, and how many of its layers have a window."""

    family: str
    windowed: int

    def moved(self, tokens: int) -> int:
        """Bytes of a prompt, whose last token is left to the consumer."""
        handed = tokens - 1
        end = -(-handed // BLOCK)
        begin = max(0, handed - WINDOW + 1) // BLOCK
        return LAYER_BYTES * (LAYERS * end - self.windowed * begin)


CASES = {
    "full and window": Case("mixed", 2),
    "window": Case("window", 4),
}


@frozen
class Pair:
    prefill: Any
    decode: Any
    switch: Path

    def dropping(self, on: bool) -> None:
        for name in ("prefill", "decode"):
            path = self.switch / f"{name}.drop"
            path.touch() if on else path.unlink(missing_ok=True)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def tiny_model(make_model: Callable[[str], str], case: Case) -> str:
    return make_model(case.family)


@pytest.fixture(scope="module")
def pair(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    switch = tmp_path_factory.mktemp("switches")
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))

    def start(name: str) -> Any:
        transport = {"transports": ["switch:switch"], "switch:switch": {"switch": str(switch / name)}}
        return bench.start(name, env={"PYTHONPATH": path}, **transport)

    made = Pair(start("prefill"), start("decode"), switch)
    bench.cluster.wait_ready(timeout_s=480)
    yield made
    for instance in (made.prefill, made.decode):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()
        assert bench.until(lambda instance=instance: is_full(instance.blocks()), 20), instance.blocks()


def is_full(blocks: dict[str, int]) -> bool:
    return blocks["free"] == blocks["total"] and blocks["held"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_single_vllm(bench: Any, case: Case, pair: Pair, keep: Any, mode: Mode) -> None:
    rows = []
    for prompt in bench.prompts(101 + MODES.index(mode), LENGTHS):
        body = bench.completion(prompt, 16)
        served = bench.serve(pair.prefill, pair.decode, body, mode)
        row = {"tokens": len(prompt), "equal": served.decode.tokens == pair.prefill.post(body).tokens}
        rows.append({**row, **served.decode.kvx, "expected_bytes": case.moved(len(prompt))})
    keep(f"vllm_window_{case.family}_{mode.value}", rows)
    assert [(row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [(True, True, 1)] * len(LENGTHS)
    assert [row["bytes"] for row in rows] == [row["expected_bytes"] for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_without_the_moved_bytes_every_answer_differs(bench: Any, pair: Pair, mode: Mode) -> None:
    """Prompts of their own, since the decode server finds what it was given in its prefix cache again."""
    rows = []
    pair.dropping(on=True)
    try:
        for prompt in bench.prompts(103 + MODES.index(mode), LENGTHS):
            body = bench.completion(prompt, 16)
            served = bench.serve(pair.prefill, pair.decode, body, mode)
            rows.append((served.decode.kvx["ok"], served.decode.tokens == pair.prefill.post(body).tokens))
    finally:
        pair.dropping(on=False)
    assert rows == [(True, False)] * len(LENGTHS)


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hits_of_either_side(bench: Any, case: Case, pair: Pair, mode: Mode) -> None:
    """Of a prefix alone the decode server may keep no window; of the same prompt it does."""
    common, one, other = bench.prompts(105 + MODES.index(mode), [192, 172, 130])
    rows = []
    for tail in (one, other, other):
        body = bench.completion(common + tail, 16)
        served = bench.serve(pair.prefill, pair.decode, body, mode)
        equal = served.decode.tokens == pair.prefill.post(body).tokens
        rows.append((equal, served.decode.kvx["ok"], case.moved(len(common + tail)) - served.decode.kvx["bytes"]))
    assert [row[:2] for row in rows] == [(True, True)] * 3
    assert rows[0][2] == 0
    assert rows[2][2] > 0


@pytest.mark.parametrize("tokens", [95, 700])
def test_a_load_that_fails_is_computed(bench: Any, pair: Pair, tokens: int) -> None:
    (prompt,) = bench.prompts(107 + tokens, [tokens])
    kvx = {"mode": "push", "transfer": secrets.token_hex(8), "from": "127.0.0.1:1"}
    answer = pair.decode.post(
        {**bench.completion(prompt), "kv_transfer_params": {"do_remote_prefill": True, "kvx": kvx}}
    )
    assert (answer.kvx["reason"], answer.kvx["computed_tokens"]) == ("peer_lost", tokens)
    assert answer.tokens == pair.prefill.post(bench.completion(prompt)).tokens
