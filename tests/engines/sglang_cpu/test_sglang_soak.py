"""A pair of SGLang under everything at once: prefix hits, clients that leave, servers that are killed.

`make soak`; SOAK_REQUESTS and SOAK_SEED change what it does, EVIDENCE names the folder of its result.
"""

from __future__ import annotations

import http.client
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
from kvx.report import document

pytestmark = [pytest.mark.sglang, pytest.mark.soak, pytest.mark.timeout(3600)]

TOKENS = 16
CLIENTS = 4
SLACK_S = 10.0


@frozen
class Work:
    index: int
    prompt: int
    leaves_after_s: float | None
    """The client leaves; None: it waits."""


@define
class Soak:
    """The pair, the seeded plan, and what became of each request."""

    bench: Any
    pair: Any
    gate: Any
    draw: random.Random
    prompts: list[list[int]] = field(factory=list)
    wanted: list[list[int]] = field(factory=list)
    rows: list[dict[str, Any]] = field(factory=list)
    kills: list[dict[str, Any]] = field(factory=list)
    lock: Any = field(factory=threading.Lock)

    def plan(self, count: int) -> list[Work]:
        draw = self.draw
        heads = [[draw.randrange(4, 512) for _ in range(length)] for length in (16, 32, 64, 100, 128, 200, 256)]
        for _ in range(max(count // 4, 1)):
            tail = [draw.randrange(4, 512) for _ in range(draw.choice([2, 5, 15, 16, 17, 33, 64, 100]))]
            self.prompts.append(draw.choice([[], *heads]) + tail)
        leaving = set(draw.sample(range(count), count * 15 // 100))
        return [
            Work(index, draw.randrange(len(self.prompts)), draw.uniform(0.0, 0.5) if index in leaving else None)
            for index in range(count)
        ]

    def one(self, work: Work) -> None:
        self.gate.wait()
        body = self.bench.completion(self.prompts[work.prompt], TOKENS)
        row: dict[str, Any] = {"prompt": len(body["prompt"])}
        started = time.monotonic()
        try:
            if work.leaves_after_s is None:
                served = self.bench.serve(self.pair.prefill, self.pair.decode, body)
                row |= self._judged(work, served)
            else:
                first, second = self.bench.legs(self.pair.prefill, body)
                with ThreadPoolExecutor(2) as both:
                    both.submit(self.pair.prefill.leave, first, work.leaves_after_s)
                    both.submit(self.pair.decode.leave, second, work.leaves_after_s).result()
                row |= {"end": "left"}
        except (OSError, http.client.HTTPException) as error:  # the connection to a server that is being killed
            row |= {"end": "failed", "reason": f"connection: {type(error).__name__}"}
        row["seconds"] = time.monotonic() - started
        with self.lock:
            self.rows.append(row)

    def _judged(self, work: Work, served: Any) -> dict[str, Any]:
        answer = served.decode
        if answer.status != 200:
            return {"end": "failed", "reason": str(answer.status), "detail": answer.text[:300]}
        return {"end": "answered", "equal": answer.tokens == self.wanted[work.prompt]}

    def kill(self, name: str, at: int) -> None:
        """Kill a server once `at` requests are over, and start it again at the same ports; the other one stays."""
        while len(self.rows) < at:
            time.sleep(0.01)
        self.gate.shut(2 * CLIENTS)
        over = len(self.rows)
        getattr(self.pair, name).child.signal(signal.SIGKILL)
        killed = time.monotonic()
        self.bench.restart(name)
        self.kills.append({"server": name, "after": over, "up_again_s": round(time.monotonic() - killed, 1)})
        self.gate.open()


def test_soak(bench: Any, pair: Any, gate: Any, keep: Any) -> None:
    count, seed = int(os.environ.get("SOAK_REQUESTS", "500")), int(os.environ.get("SOAK_SEED", "1"))
    soak = Soak(bench, pair, gate, random.Random(seed))  # noqa: S311
    work = soak.plan(count)
    soak.wanted = [pair.single.post(bench.completion(prompt, TOKENS)).tokens for prompt in soak.prompts]
    gate.open()
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(lambda: [soak.kill("prefill", count // 3), soak.kill("decode", count * 2 // 3)])
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(soak.one, work))
        killing.result()
    seconds = time.monotonic() - started
    rest = bench.until(pair.idle, 90)
    ends = Counter(row["end"] for row in soak.rows)
    failed = [row for row in soak.rows if row["end"] == "failed"]
    different = [row for row in soak.rows if row["end"] == "answered" and not row["equal"]]
    table = bounds(Options.load(pair.decode.server.options, env={}))
    limit = max(value for what, value in table.items() if what != "a transfer is alive and too slow")
    result = {
        "requests": len(soak.rows),
        "seed": seed,
        "concurrency": CLIENTS,
        "seconds": round(seconds, 1),
        "kills": soak.kills,
        "ends": dict(ends),
        "answered_differently": different,
        "failed": dict(Counter(row["reason"] for row in failed)),
        "failed_details": sorted({row["detail"] for row in failed if "detail" in row})[:12],
        "failed_longest_s": max((row["seconds"] for row in failed), default=0.0),
        "bound_s": limit,
        "loads_at_the_end": {"prefill": pair.prefill.loads(), "decode": pair.decode.loads()},
    }
    keep("soak-sglang", document("soak-sglang", result))
    assert len(soak.rows) == count
    assert rest, (pair.prefill.loads(), pair.decode.loads(), pair.prefill.status(), pair.decode.status())
    assert len(different) <= 0.005 * ends["answered"]
    assert result["failed_longest_s"] < limit + SLACK_S
    assert ends["answered"] > count * 3 // 4
