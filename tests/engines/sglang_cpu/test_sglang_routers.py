"""Two routers in front of one pair: kvx's, and SGLang's own; behind that, SGLang's comparison of log probabilities."""

from __future__ import annotations

import http.client
import json
import sys
import unittest
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvx.cluster import free_ports
from kvx.driver import Launch, Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LENGTHS = [5, 16, 33, 100, 200]
PARITY_LENGTHS = [7, 64, 257]
"""Prompts of SGLang's own comparison; the last one is sent a second time, when only prefill has it already."""


@contextmanager
def router(bench: Any, pair: Any, name: str, port: int, *command: str, ready: str = "/health") -> Iterator[Any]:
    """A router, while the block runs."""
    launch = Launch((sys.executable, "-m", *command), {}, ready)
    child = bench.cluster.start(name, launch, f"http://127.0.0.1:{port}")
    bench.cluster.wait_ready(child, timeout_s=120)
    yield type(pair.decode)(child, Server(bench.model, port), "", "", pair.decode.events, {})
    bench.cluster.stop(child)


@contextmanager
def sglangs(bench: Any, pair: Any, name: str, decode: Any) -> Iterator[Any]:
    """SGLang's router, as its own documentation starts it."""
    port, metrics = free_ports(2)
    meeting = pair.prefill.meeting.rpartition(":")[2]
    pools = ("--pd-disaggregation", "--prefill", pair.prefill.url, meeting, "--decode", decode.url)
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics))
    command = ("sglang_router.launch_router", *pools, *where)
    # It is healthy before it knows its servers.
    with router(bench, pair, name, port, *command, ready="/readiness") as started:
        yield started


@pytest.fixture(scope="module")
def own_router(bench: Any, pair: Any) -> Iterator[Any]:
    with sglangs(bench, pair, "sglang-router", pair.decode) as started:
        yield started


def as_text(bench: Any, prompt: list[int], **more: Any) -> dict[str, Any]:
    """SGLang's router takes no token ids for this path."""
    return {**bench.completion(prompt, **more), "prompt": " ".join(f"w{token}" for token in prompt)}


def through(bench: Any, pair: Any, router: Any) -> list[dict[str, Any]]:
    """Requests through a router, compared with SGLang alone."""
    rows = []
    for prompt in bench.prompts(30, LENGTHS):
        body = as_text(bench, prompt)
        answer = router.post(body)
        assert answer.status == 200, answer.text
        rows.append({"tokens": len(prompt), "equal": answer.tokens == pair.single.post(body).tokens})
    return rows


def test_kvx_router(bench: Any, pair: Any, keep: Any) -> None:
    (port,) = free_ports(1)
    pools = ("--prefill", f"{pair.prefill.url}={pair.prefill.meeting}", "--decode", pair.decode.url)
    command = ("kvx", "router", "--engine", "sglang", "--port", str(port), *pools)
    with router(bench, pair, "kvx-router", port, *command) as one:
        rows = through(bench, pair, one)
    keep("sglang_router_kvx", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []


def test_sglangs_own_router(bench: Any, pair: Any, own_router: Any, keep: Any) -> None:
    rows = through(bench, pair, own_router)
    keep("sglang_router_own", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []


def test_a_client_leaves_sglangs_own_router_in_mid_transfer(bench: Any, pair: Any, own_router: Any, keep: Any) -> None:
    (prompt,) = bench.prompts(32, [300])
    before = len(pair.decode.outcomes())
    bench.turn("hold", on=True)
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", own_router.server.port, timeout=120)) as client:
            body = {**as_text(bench, prompt, tokens=200), "stream": True}
            client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            assert bench.until(lambda: "'moving'" in str(pair.prefill.status()["open"]), 30), pair.prefill.status()
        assert bench.until(lambda: len(pair.decode.outcomes()) > before, 60), pair.decode.status()
    finally:
        bench.turn("hold", on=False)
    outcome = pair.decode.outcomes()[-1]
    keep("sglang_router_own_abort", {"ok": outcome["ok"], "reason": outcome["reason"], "detail": outcome["detail"]})
    assert outcome["reason"] == "aborted"
    assert bench.until(pair.idle, 60), (pair.prefill.loads(), pair.decode.loads(), pair.decode.status())
    assert all(row["equal"] for row in through(bench, pair, own_router))


def parity(pair: Any, router: Any, decode: Any, prompts: list[list[int]]) -> Any:
    """The test in SGLang's wheel that compares a single server with a pair behind a router, told where ours are."""
    from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin

    class Parity(PDLogprobParityMixin, unittest.TestCase):  # type: ignore[misc]
        prefill_url, decode_url, lb_url = pair.prefill.url, decode.url, router.url
        process_prefill, process_decode, process_lb = (
            pair.prefill.child.process,
            decode.child.process,
            router.child.process,
        )
        parity_prompts = prompts
        parity_cached_prefix_min_prompt_tokens = PARITY_LENGTHS[-1] - 1

        def _collect_references(self) -> list[Any]:
            return [self._generate(base_url=pair.single.url, input_ids=prompt) for prompt in self.parity_prompts]

        def launch_all(self) -> None:
            """They run."""

    return Parity("test_logprob_parity")


@pytest.mark.filterwarnings("ignore")  # SGLang's test helpers import much
def test_log_probabilities_as_sglang_compares_them(bench: Any, pair: Any, own_router: Any, keep: Any) -> None:
    prompts = bench.prompts(31, PARITY_LENGTHS)
    case = parity(pair, own_router, pair.decode, prompts)
    case.test_logprob_parity()
    with sglangs(bench, pair, "sglang-router-control", pair.control) as losing:
        control = parity(pair, losing, pair.control, prompts[1:])
        with pytest.raises(AssertionError, match="prompt_tokens") as difference:
            control.test_logprob_parity()
    told = {"prompts": PARITY_LENGTHS, "tokens": case.parity_max_new_tokens, "delta": case.parity_logprob_delta}
    keep("sglang_logprob_parity", {**told, "passed": True, "control": str(difference.value).splitlines()[0]})
