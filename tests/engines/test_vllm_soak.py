"""A pair of vLLM behind kvx's router, under everything at once: prefix hits, a tiny pool, clients that leave, kills.

`make soak`; SOAK_REQUESTS and SOAK_SEED change what it does, EVIDENCE names the folder of its result.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from attrs import define, field, frozen

from kvx.config import Options, bounds
from kvx.core.model import Mode
from kvx.report import document

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(3600)]

EMPTY = {"total": 64, "free": 64, "held": 0}
NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities are this close may come in either order, where requests share a batch."""


@frozen
class Work:
    index: int
    prompt: int
    tokens: int
    mode: Mode
    leaves_after_s: float | None
    """The client leaves; None: it waits."""


@define
class Soak:
    """The pair, the seeded plan, and what became of each request."""

    bench: Any
    prefill: Any
    decode: Any
    single: Any
    routers: dict[Mode, Any]
    gate: Any
    draw: random.Random
    prompts: list[list[int]] = field(factory=list)
    wanted: list[list[int]] = field(factory=list)
    rows: list[dict[str, Any]] = field(factory=list)
    kills: list[dict[str, Any]] = field(factory=list)
    lock: Any = field(factory=threading.Lock)

    def plan(self, count: int) -> list[Work]:
        draw = self.draw
        heads = [[draw.randrange(3, 2000) for _ in range(length)] for length in (32, 64, 100, 128, 200, 256, 300, 400)]
        for _ in range(max(count // 4, 1)):
            head = draw.choice([[], *heads])
            tail = [draw.randrange(3, 2000) for _ in range(draw.choice([2, 5, 31, 32, 33, 64, 100, 257]))]
            self.prompts.append(head + tail)
        leaving = set(draw.sample(range(count), count * 15 // 100))
        return [
            Work(
                index,
                draw.randrange(len(self.prompts)),
                draw.choice([4, 8, 8, 16, 60]),
                draw.choice(list(Mode)),
                draw.uniform(0.0, 0.4) if index in leaving else None,
            )
            for index in range(count)
        ]

    # -------------------------------------------------------- one request

    def one(self, work: Work) -> None:
        self.gate.wait()
        body = self.bench.completion(self.prompts[work.prompt], work.tokens)
        row: dict[str, Any] = {"index": work.index, "prompt": len(body["prompt"]), "mode": work.mode.value}
        started = time.monotonic()
        router = self.routers[work.mode]
        if work.leaves_after_s is None:
            row |= self._judged(work, router.post(body))
        else:
            router.abandon(body, work.leaves_after_s)
            row |= {"end": "left"}
        row["seconds"] = time.monotonic() - started
        with self.lock:
            self.rows.append(row)

    def _judged(self, work: Work, answer: Any) -> dict[str, Any]:
        if answer.status != 200:
            error = answer.body.get("error", answer.body)
            return {"end": "failed", "reason": f"{answer.status} {error.get('type')}", "detail": error.get("message")}
        wanted = self.wanted[work.prompt][: work.tokens]
        row = {"end": "answered", "equal": answer.tokens == wanted, **answer.kvx}
        if not row["equal"]:
            row |= {"tokens": answer.tokens, "wanted": wanted, "asked": work.prompt}
        return row

    # -------------------------------------------------------- kills

    def kill(self, name: str, at: int) -> None:
        """Kill a server once `at` requests are over, and start it again at the same ports; nobody else restarts."""
        while len(self.rows) < at:
            time.sleep(0.01)
        time.sleep(self.draw.uniform(0.0, 0.3))
        self.gate.shut(8)
        instance = getattr(self, name)
        over = len(self.rows)
        instance.child.signal(signal.SIGKILL)
        killed = time.monotonic()
        self.bench.restart(name)
        assert self.bench.until(self._routers_see_both, 60)
        self.kills.append({"server": name, "after": over, "up_again_s": round(time.monotonic() - killed, 1)})
        self.gate.open()

    def _routers_see_both(self) -> bool:
        return all(router.health() == 200 for router in self.routers.values())

    # -------------------------------------------------------- the verdict

    def near_tie(self, row: dict[str, Any]) -> float:
        """The gap between the single instance's two best tokens, where the answer first differs."""
        at = next(i for i, (a, b) in enumerate(zip(row["tokens"], row["wanted"], strict=True)) if a != b)
        prompt = [*self.prompts[row["asked"]], *row["wanted"][:at]]
        best = self.single.post(self.bench.completion(prompt, 1, logprobs=2)).body["choices"][0]["logprobs"]
        one, two = sorted(best["top_logprobs"][0].values(), reverse=True)[:2]
        return float(one - two)

    def outcomes(self) -> list[dict[str, Any]]:
        return [*self.prefill.outcomes().values(), *self.decode.outcomes().values()]


def test_soak(bench: Any, gate: Any, keep: Any) -> None:
    count, seed = int(os.environ.get("SOAK_REQUESTS", "1000")), int(os.environ.get("SOAK_SEED", "1"))
    print(f"soak: {count} requests, seed {seed}")
    draw = random.Random(seed)  # noqa: S311
    prefill, decode, single = bench.start("prefill"), bench.start("decode"), bench.start_single("single")
    bench.cluster.wait_ready(timeout_s=480)
    routers = {mode: bench.start_router(mode, prefill, decode) for mode in Mode}
    bench.cluster.wait_ready(timeout_s=120)
    soak = Soak(bench, prefill, decode, single, routers, gate, draw)
    work = soak.plan(count)
    soak.wanted = [single.post(bench.completion(prompt, 60)).tokens for prompt in soak.prompts]
    victims = ["prefill"] * 3 + ["decode"] * 2
    draw.shuffle(victims)
    moments = sorted(draw.sample(range(count // 20, count * 19 // 20), len(victims)))
    gate.open()
    started = time.monotonic()
    with ThreadPoolExecutor(5) as pool:

        def killer() -> None:
            for name, at in zip(victims, moments, strict=True):
                soak.kill(name, at)

        killing = pool.submit(killer)
        with ThreadPoolExecutor(4) as clients:
            list(clients.map(soak.one, work))
        killing.result()
    seconds = time.monotonic() - started
    drained = bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 60)
    pools = {"prefill": prefill.blocks(), "decode": decode.blocks()}

    answered = [row for row in soak.rows if row["end"] == "answered"]
    failed = [row for row in soak.rows if row["end"] == "failed"]
    other = [{**row, "gap": soak.near_tie(row)} for row in answered if not row["equal"]]
    table = bounds(Options.load(decode.server.options, env={}))
    limit = max(value for what, value in table.items() if what != "a transfer is alive and too slow")
    ended = [outcome for outcome in soak.outcomes() if not outcome["ok"]]
    result = {
        "requests": len(soak.rows),
        "seed": seed,
        "concurrency": 4,
        "seconds": round(seconds, 1),
        "kills": soak.kills,
        "left": sum(row["end"] == "left" for row in soak.rows),
        "answered": len(answered),
        "answered_equal": sum(row["equal"] for row in answered),
        "answered_after_a_failed_transfer": sum(row.get("ok") is False for row in answered),
        "near_ties": other,
        "failed": dict(Counter(row["reason"] for row in failed)),
        "failed_details": [row["detail"][:200] for row in failed[:: max(len(failed) // 8, 1)]],
        "failed_longest_s": max((row["seconds"] for row in failed), default=0.0),
        "failed_transfers": dict(Counter(outcome["reason"] for outcome in ended)),
        "failed_transfers_longest_s": max((outcome["seconds"] for outcome in ended), default=0.0),
        "bound_s": limit,
        "ok_transfers": sum(outcome["ok"] for outcome in soak.outcomes()),
        "bytes": sum(outcome["bytes"] for outcome in soak.outcomes() if outcome["ok"]),
        "preemptions_since_last_start": {"prefill": prefill.preemptions(), "decode": decode.preemptions()},
        "pools_at_the_end": pools,
    }
    keep("soak-vllm", document("soak-vllm", result))
    assert len(soak.rows) == count
    assert len(soak.kills) == len(victims)
    assert drained, (prefill.status(), decode.status())
    assert pools == {"prefill": EMPTY, "decode": EMPTY}
    assert [row for row in other if row["gap"] >= NEAR_TIE] == []
    assert len(other) <= 0.005 * len(answered)
    assert all(row["detail"] for row in failed)
    assert result["failed_longest_s"] < limit + 5
    assert result["failed_transfers_longest_s"] < limit + 5
    assert len(answered) > count * 3 // 4
