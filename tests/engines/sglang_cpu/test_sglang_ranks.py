"""Unequal numbers of TP ranks: pages are cut by heads on the way. A file of its own, since it needs other servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvx.core.model import Role

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]

LENGTHS = [1, 15, 16, 17, 33, 64, 100, 200]


@pytest.fixture(scope="module")
def ranks(bench: Any) -> Iterator[dict[str, Any]]:
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(2))
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": cores}  # on one NUMA node SGLang wants the cores of each rank named
    servers = {
        "single": bench.start("ranks-single", None),
        "prefill 1": bench.start("prefill-tp1", Role.PRODUCER),
        "decode 1": bench.start("decode-tp1", Role.CONSUMER),
        "prefill 2": bench.start("prefill-tp2", Role.PRODUCER, "--tp", "2", env=bind),
        "decode 2": bench.start("decode-tp2", Role.CONSUMER, "--tp", "2", env=bind),
    }
    bench.cluster.wait_ready(timeout_s=900)
    yield servers
    for server in servers.values():
        bench.cluster.stop(server.child)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_tokens_are_those_of_a_single_sglang(bench: Any, ranks: Any, keep: Any, prefill: int, decode: int) -> None:
    rows = []
    p, d = ranks[f"prefill {prefill}"], ranks[f"decode {decode}"]
    for prompt in bench.prompts(20 + 2 * prefill + decode, LENGTHS):
        body = bench.completion(prompt)
        served = bench.serve(p, d, body)
        assert served.decode.status == 200, served.decode.text
        rows.append({"tokens": len(prompt), "equal": served.decode.tokens == ranks["single"].post(body).tokens})
    keep(f"sglang_tp{prefill}_to_tp{decode}", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    assert bench.until(lambda: not p.status()["open"] and not d.status()["open"], 20)
