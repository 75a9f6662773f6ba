"""Two routers in front of one pair: kvx's, and SGLang's own."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from kvx.cluster import free_ports
from kvx.driver import Launch, Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LENGTHS = [5, 16, 33, 100, 200]
ROUTER = os.environ.get("SGLANG_ROUTER", "")
"""The Python of an environment that has SGLang's router, which is no part of ours."""


def through(bench: Any, pair: Any, name: str, command: tuple[str, ...], port: int) -> list[dict[str, Any]]:
    """Requests through a router, compared with SGLang alone."""
    child = bench.cluster.start(name, Launch(command, {}, "/health"), f"http://127.0.0.1:{port}")
    bench.cluster.wait_ready(child, timeout_s=120)
    router = type(pair.decode)(child, Server(bench.model, port), "", "", pair.decode.events, {})
    rows = []
    for prompt in bench.prompts(30, LENGTHS):
        # As text: SGLang's router takes no token ids for this path.
        body = {**bench.completion(prompt), "prompt": " ".join(f"w{token}" for token in prompt)}
        answer = router.post(body)
        assert answer.status == 200, answer.text
        rows.append({"tokens": len(prompt), "equal": answer.tokens == pair.single.post(body).tokens})
    bench.cluster.stop(child)
    return rows


def test_kvx_router(bench: Any, pair: Any, keep: Any) -> None:
    (port,) = free_ports(1)
    prefill, decode = pair.prefill, pair.decode
    pools = ("--prefill", f"{prefill.url}={prefill.meeting}", "--decode", decode.url)
    command = (sys.executable, "-m", "kvx", "router", "--engine", "sglang", "--port", str(port), *pools)
    rows = through(bench, pair, "kvx-router", command, port)
    keep("sglang_router_kvx", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []


@pytest.mark.skipif(not ROUTER, reason="SGLANG_ROUTER names no Python that has SGLang's router")
def test_sglangs_own_router(bench: Any, pair: Any, keep: Any) -> None:
    port, metrics = free_ports(2)
    prefill, decode = pair.prefill, pair.decode
    meeting = prefill.meeting.rpartition(":")[2]
    pools = ("--pd-disaggregation", "--prefill", prefill.url, meeting, "--decode", decode.url)
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics))
    command = (ROUTER, "-m", "sglang_router.launch_router", *pools, *where)
    rows = through(bench, pair, "sglang-router", command, port)
    keep("sglang_router_own", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []
