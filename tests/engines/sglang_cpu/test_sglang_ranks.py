"""Two TP ranks on one side or on both: pages are cut by heads on the way. Two servers of two ranks, beside the pair."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvx.core.model import Role

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

LENGTHS = [1, 15, 16, 17, 64, 100, 200]


@pytest.fixture(scope="module")
def ranks(bench: Any, pair: Any) -> Iterator[dict[str, dict[int, Any]]]:
    """Role to number of ranks to server."""
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(2))
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": cores}  # on one NUMA node SGLang wants the cores of each rank named
    options = bench.decode_options()
    prefill = bench.start("prefill-tp2", Role.PRODUCER, "--tp", "2", env=bind, **options)
    decode = bench.start("decode-tp2", Role.CONSUMER, "--tp", "2", env=bind, **options)
    bench.cluster.wait_ready(prefill.child, decode.child, timeout_s=900)
    # The first forward of two ranks can take longer than a transfer waits here: whether it did is nobody's matter.
    bench.serve(prefill, pair.decode, bench.completion([3, 4, 5]))
    bench.serve(pair.prefill, decode, bench.completion([3, 4, 5]))
    yield {"prefill": {1: pair.prefill, 2: prefill}, "decode": {1: pair.decode, 2: decode}}
    bench.stop("prefill-tp2")
    bench.stop("decode-tp2")


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_tokens_are_those_of_a_single_sglang(
    bench: Any, pair: Any, ranks: Any, keep: Any, prefill: int, decode: int
) -> None:
    rows = []
    p, d = ranks["prefill"][prefill], ranks["decode"][decode]
    for prompt in bench.prompts(20 + 2 * prefill + decode, LENGTHS):
        body = bench.completion(prompt)
        served = bench.serve(p, d, body)
        assert served.decode.status == 200, served.decode.text
        row = {"tokens": len(prompt), "equal": served.decode.tokens == pair.single.post(body).tokens}
        rows.append({**row, "seconds": served.decode.seconds})
    keep(f"sglang_tp{prefill}_to_tp{decode}", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    assert bench.until(lambda: not p.status()["open"] and not d.status()["open"], 20)
