"""A prefill and a decode server of SGLang over kvx_tcp, beside SGLang alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PAGE = 16
PAGE_BYTES = 6 * PAGE * 4 * 16 * 4
LENGTHS = [
    *(1, 2, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 97, 100, 127, 128, 129),
    *(144, 150, 191, 192, 193, 200, 255, 256, 257, 300, 333, 400, 512, 700),
]
"""Around pages of 16 tokens, and around prefill's chunks of 64."""


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_tokens_are_those_of_a_single_sglang(bench: Any, pair: Any, keep: Any) -> None:
    rows = []
    for prompt in bench.prompts(1, LENGTHS):
        body = bench.completion(prompt)
        wanted = pair.single.post(body).tokens
        before = len(pair.decode.outcomes())
        served = bench.serve(pair.prefill, pair.decode, body)
        assert served.decode.status == 200, served.decode.text
        assert bench.until(lambda: len(pair.decode.outcomes()) == before + 1, 10)  # noqa: B023
        outcome = pair.decode.outcomes()[-1]
        row = {"tokens": len(prompt), "equal": served.decode.tokens == wanted, "seconds": served.decode.seconds}
        rows.append({**row, "ok": outcome["ok"], "bytes": outcome["bytes"], "kv": pages(len(prompt)) * PAGE_BYTES})
    keep("sglang_tokens", {"requests": rows, "loads": pair.decode.loads()})
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    assert {row["ok"] for row in rows} == {True}
    # What comes beside the pages is one row of metadata, the same for all.
    assert len({row["bytes"] - row["kv"] for row in rows}) == 1


def test_the_decode_servers_prefix_cache_takes_a_part_or_all(bench: Any, pair: Any, keep: Any) -> None:
    """Only pages that decode lacks are moved; a whole prompt of full pages needs none but the row."""
    head, tail, other, whole = bench.prompts(2, [150, 50, 40, 192])
    rows = []
    for what, prompt in (
        ("new", head + tail),
        ("a prefix hit", head + other),
        ("all of it", head + tail),
        ("new, whole pages", whole),
        ("all of it, whole pages", whole),
    ):
        body = bench.completion(prompt)
        wanted = pair.single.post(body).tokens
        before = len(pair.decode.outcomes())
        served = bench.serve(pair.prefill, pair.decode, body)
        assert served.decode.status == 200, served.decode.text
        assert bench.until(lambda: len(pair.decode.outcomes()) == before + 1, 10)  # noqa: B023
        moved = pair.decode.outcomes()[-1]["bytes"] // PAGE_BYTES
        row = {"what": what, "tokens": len(prompt), "pages": pages(len(prompt)), "pages_moved": moved}
        rows.append({**row, "equal": served.decode.tokens == wanted})
    keep("sglang_prefix_hits", rows)
    assert [row["what"] for row in rows if not row["equal"]] == []
    assert [row["pages_moved"] for row in rows] == [13, 3, 1, 12, 0]


def test_five_at_once(bench: Any, pair: Any, keep: Any) -> None:
    rows = []
    for seed in (3, 4):
        work = [bench.completion(prompt) for prompt in bench.prompts(seed, [400, 33, 257, 64, 5])]
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda body: bench.serve(pair.prefill, pair.decode, body).decode, work))
        wanted = [pair.single.post(body).tokens for body in work]
        rows += [
            {"tokens": len(body["prompt"]), "equal": answer.tokens == tokens}
            for body, answer, tokens in zip(work, answers, wanted, strict=True)
        ]
    keep("sglang_concurrent", rows)
    assert [row["tokens"] for row in rows if not row["equal"]] == []


def test_without_the_moved_bytes_every_answer_differs(bench: Any, pair: Any, keep: Any) -> None:
    """Metadata comes, KV cache does not: if tokens were equal here too, equality would prove nothing."""
    rows = []
    for prompt in bench.prompts(5, [16, 17, 33, 64, 100, 200, 257, 400]):
        body = bench.completion(prompt)
        answer = bench.serve(pair.prefill, pair.control, body).decode
        assert answer.status == 200, answer.text
        rows.append({"tokens": len(prompt), "equal": answer.tokens == pair.single.post(body).tokens})
    keep("sglang_control", rows)
    assert [row["tokens"] for row in rows if row["equal"]] == []


def test_sglangs_own_metrics_tell_of_transfers(bench: Any, pair: Any, keep: Any) -> None:
    """Those of the prefill server, which takes them from kvx's sender."""
    (prompt,) = bench.prompts(6, [100])
    assert bench.until(pair.idle, 30), pair.prefill.loads()
    before = transfer_metrics(pair.prefill)
    assert bench.serve(pair.prefill, pair.decode, bench.completion(prompt)).decode.status == 200
    # The count of speeds is the last that SGLang adds to.
    count, size = "sglang:kv_transfer_speed_gb_s_count", "sglang:kv_transfer_total_mb_sum"
    assert bench.until(lambda: transfer_metrics(pair.prefill).get(count, 0) == before.get(count, 0) + 1, 20)
    after = transfer_metrics(pair.prefill)
    keep("sglang_metrics", {"before": before, "after": after})
    assert (after[size] - before.get(size, 0)) * 2**20 == pytest.approx(pages(len(prompt)) * PAGE_BYTES)


def transfer_metrics(server: Any) -> dict[str, float]:
    """Sums, counts and counters of SGLang's metrics whose names speak of transfers."""
    found: dict[str, float] = {}
    for line in server.ask("GET", "/metrics").body["text"].splitlines():
        name, value = line.partition("{")[0], line.rpartition(" ")[2]
        if "transfer" in name and name.startswith("sglang:") and not name.endswith("_bucket"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def test_both_pools_are_full_at_rest(bench: Any, pair: Any) -> None:
    """SGLang's own check of its pools runs while it is idle, and ends a server that has lost a page."""
    assert bench.until(pair.idle, 30), (pair.prefill.loads(), pair.decode.loads(), pair.decode.status())
