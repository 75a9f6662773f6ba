"""A pair that moves its cache over NIXL, by UCX on this machine's TCP sockets and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvx.core.model import Role

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

UCX = "nixl-ucx"
LENGTHS = [1, 15, 16, 17, 64, 65, 100, 257, 700]


@pytest.fixture(scope="module")
def servers(bench: Any) -> Iterator[tuple[Any, Any]]:
    """Prefill, which can also push to the decode server that loses every byte; and decode, with NIXL alone."""
    losing = bench.control_options()
    both = {**losing, "transports": [UCX, *losing["transports"]]}
    prefill = bench.start("prefill-nixl", Role.PRODUCER, "--chunked-prefill-size", "64", **both)
    decode = bench.start("decode-nixl", Role.CONSUMER, transports=[UCX])
    bench.cluster.wait_ready(prefill.child, decode.child, timeout_s=900)
    yield prefill, decode
    bench.stop("prefill-nixl")
    bench.stop("decode-nixl")


def test_tokens_over_nixl_are_those_of_a_single_sglang(bench: Any, pair: Any, servers: Any, keep: Any) -> None:
    prefill, decode = servers
    rows = []
    for prompt in bench.prompts(40, LENGTHS):
        body = bench.completion(prompt)
        served = bench.serve(prefill, decode, body)
        assert served.decode.status == 200, served.decode.text
        control = bench.serve(prefill, pair.control, body).decode
        assert control.status == 200, control.text
        wanted = pair.single.post(body).tokens
        row = {"tokens": len(prompt), "equal": served.decode.tokens == wanted}
        rows.append({**row, "control_equal": control.tokens == wanted})
    assert bench.until(lambda: len(decode.outcomes()) == len(rows), 20)
    for row, outcome in zip(rows, decode.outcomes(), strict=True):
        row |= {"ok": outcome["ok"], "bytes": outcome["bytes"]}
    keep("sglang_nixl", {"transport": UCX, "requests": rows})
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    assert [row["tokens"] for row in rows if row["control_equal"] and row["tokens"] > 1] == []
    assert {row["ok"] for row in rows} == {True}
    assert bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 20)
