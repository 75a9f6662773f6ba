"""What NIXL costs here: copies beside other ways, preparing and posting many pieces, being idle, waking up."""

from __future__ import annotations

import base64
import os
import secrets
import select
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx import plugins
from kvx.bench import transport
from kvx.bench.child import Child
from kvx.bench.slab import Slab
from kvx.bench.target import INITIATOR, STAMPS, TARGET, info
from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op
from kvx_nixl.agent import Agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PIECES = 131_072
REPEAT = 15


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pieces", [1, 64, 4096])
def test_copies_beside_tcp_and_plain_sockets(sections: dict[str, dict[str, Any]], keep: Any, pieces: int) -> None:
    """64 MiB each way, in turns."""
    load = os.getloadavg()[0]
    found = transport.run(("tcp", *sections), pieces=pieces, repeat=REPEAT, options=sections)
    keep("bench-transport", f"{pieces} pieces", load=load, **found)
    assert all(row["verified"] and len(row["samples"]) == REPEAT for row in found["results"])
    assert {(row["name"], row["op"]) for row in found["ratios"]} == {
        (name, op.value) for name in ("tcp", *sections) for op in Op
    }


@pytest.mark.parametrize("op", Op)
def test_many_pieces(pair: Any, pump: Any, monkeypatch: Any, keep: Any, name: str, op: Op) -> None:
    initiator, target = pair(PIECES * (512 + 64))
    spent = {"prepare": 0.0, "make": 0.0, "start": 0.0}
    longest = dict.fromkeys(spent, 0.0)

    def timed(what: str) -> Callable[..., Any]:
        inner = getattr(Agent, what)

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                took = time.perf_counter() - started
                spent[what] += took
                longest[what] = max(longest[what], took)

        return call

    for what in spent:
        monkeypatch.setattr(Agent, what, timed(what))
    offsets = np.random.default_rng(1).permutation(PIECES).astype(np.int64) * (512 + 64)
    here = Descriptors(np.zeros_like(offsets), offsets, np.full_like(offsets, 512))
    there = Descriptors(here.region, offsets[::-1].copy(), here.length)
    source, sink = (initiator, target) if op is Op.WRITE else (target, initiator)
    source.memory[:] = np.random.default_rng(2).integers(1, 256, len(source.memory), dtype=np.uint8)
    initiator.post(1, target, Op.READ, Descriptors.of([(0, 0, 0)]), Descriptors.of([(0, 0, 0)]))
    pump(initiator, target, until=lambda: initiator.done(1))
    started = time.perf_counter()
    initiator.post(2, target, op, here, there)
    accepted = time.perf_counter() - started
    pump(initiator, target, until=lambda: initiator.done(2))
    total = time.perf_counter() - started
    assert np.count_nonzero(sink.memory) == PIECES * 512
    keep(
        "nixl-measures",
        f"{name} {op.value} of {PIECES} pieces of 512 bytes",
        runtime_thread_ms=accepted * 1e3,
        total_ms=total * 1e3,
        spent_ms={what: seconds * 1e3 for what, seconds in spent.items()},
        longest_call_ms={what: seconds * 1e3 for what, seconds in longest.items()},
    )


def test_an_idle_pair_and_its_first_operation(name: str, sections: dict[str, dict[str, Any]], keep: Any) -> None:
    """An idle process takes less than 2 % of a core; the first operation after that pays for waking up."""
    secret = secrets.token_bytes(32)
    here = Slab(4096, 1, seed=1)
    mine = plugins.make_transport(name, {**sections[name], "peer": str(INITIATOR), "secret": secret})
    setup = {"transport": name, "options": sections[name], "secret": base64.b64encode(secret).decode()}
    try:
        mine.register([here.region])
        with Child("kvx.bench.target", setup | {"bytes": 4096, "pieces": 1}) as child:
            mine.connect(info(TARGET), base64.b64decode(child.hello["metadata"]))
            child.ask({"metadata": base64.b64encode(mine.metadata()).decode()})
            done = iter(range(1, 10_000))

            def copy(op: Op) -> float:
                op_id, started = next(done), time.perf_counter()
                mine.post(op_id, TARGET, op, here.descriptors, Slab(4096, 1, seed=2).descriptors, STAMPS[op])
                while True:
                    select.select([mine], [], [], 5.0)
                    for one in mine.poll():
                        assert isinstance(one, OpDone), one
                        return time.perf_counter() - started

            hot = {op: statistics.median(copy(op) for _ in range(50)) for op in Op}
            cold = {op: [] for op in Op}
            for _ in range(8):
                for op in Op:
                    select.select([], [], [], 0.8)
                    mine.poll()
                    cold[op].append(copy(op))
            select.select([], [], [], 1.0)
            mine.poll()
            before = [_cpu_s(pid) for pid in (os.getpid(), child.pid)]
            for _ in range(10):
                select.select([mine], [], [], 1.0)
                mine.poll()
            shares = [100 * (_cpu_s(pid) - old) / 10 for pid, old in zip((os.getpid(), child.pid), before, strict=True)]
    finally:
        mine.close()
    keep(
        "nixl-measures",
        f"{name} idle, and 4096 bytes",
        idle_percent_of_a_core=shares,
        hot_us={op.value: seconds * 1e6 for op, seconds in hot.items()},
        after_rest_us={op.value: statistics.median(samples) * 1e6 for op, samples in cold.items()},
    )
    assert max(shares) < 2.0, shares


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
