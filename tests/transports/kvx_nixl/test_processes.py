"""Peers that are processes: stopped and killed in mid-transfer, restarted again and again."""

from __future__ import annotations

import base64
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvx import plugins
from kvx.bench.child import Child
from kvx.bench.slab import Slab
from kvx.bench.target import INITIATOR, STAMPS, info
from kvx.cluster import wait_stopped
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Op, Peer, Reason
from kvx_nixl.transport import NixlTransport

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 60.0
BIG = 64 << 20
SMALL = 64 << 10
ROUNDS = 100
QUIET_S = 0.5


class There:
    """A child process that serves one slab under a name of its own."""

    def __init__(self, here: Here, name: str, nbytes: int) -> None:
        self.peer = Peer(name, 0)
        self.slab = Slab(nbytes, 16, seed=1)
        self.remote = Slab(nbytes, 16, seed=2).descriptors
        setup = {"transport": here.name, "options": {**here.section}, "peer": str(self.peer)}
        secret = base64.b64encode(here.secret).decode()
        self.child = Child("kvx.bench.target", {**setup, "secret": secret, "bytes": nbytes, "pieces": 16})
        here.transport.connect(
            attrs.evolve(info(self.peer), epoch=secrets.randbits(60)), base64.b64decode(self.child.hello["metadata"])
        )
        self.child.ask({"metadata": base64.b64encode(here.transport.metadata()).decode()})

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def end(self) -> None:
        self.child.__exit__(None, None, None)


class Here:
    """This process's rank. Its memory is that of the slabs of the peers that it will have."""

    def __init__(self, name: str, section: dict[str, Any], **more: Any) -> None:
        self.name, self.section, self.secret = name, section, secrets.token_bytes(32)
        made = plugins.make_transport(name, {**section, **more, "peer": str(INITIATOR), "secret": self.secret})
        assert isinstance(made, NixlTransport)
        self.transport = made
        self.big, self.small = Slab(BIG, 16, seed=1), Slab(SMALL, 16, seed=1)
        regions = [self.big.region, attrs.evolve(self.small.region, index=1)]
        self.transport.register(regions)
        self.ended: dict[int, OpDone | OpFailed] = {}
        self.posted = 0

    def post(self, there: There, op: Op) -> int:
        self.posted += 1
        big = there.slab.nbytes == BIG
        local = (self.big if big else self.small).descriptors
        local = local if big else attrs.evolve(local, region=local.region + 1)
        self.transport.post(self.posted, there.peer, op, local, there.remote, STAMPS[op])
        return self.posted

    def poll(self, until: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
        """Seconds until it held."""
        started = time.monotonic()
        while not until():
            assert time.monotonic() < started + limit_s, self.ended
            select.select([self.transport], [], [], 0.02)
            for one in self.transport.poll():
                assert isinstance(one, OpDone | OpFailed)
                self.ended[one.op_id] = one
        return time.monotonic() - started

    def copy(self, there: There, op: Op, sample: int) -> None:
        """One verified copy of the small slab."""
        if op is Op.WRITE:
            self.small.fill(sample)
        else:
            there.child.ask({"fill": sample})
        op_id = self.post(there, op)
        self.poll(lambda: op_id in self.ended)
        assert isinstance(self.ended[op_id], OpDone), self.ended[op_id]
        assert self.small.matches(sample) if op is Op.READ else there.child.ask({"check": sample})["matches"]

    def moving(self, there: There, op: Op) -> int:
        """A large operation of which the first posts are in flight."""
        op_id = self.post(there, op)
        self.poll(lambda: op_id in self.ended or any(link.flying for link in self.transport._all_links()))
        return op_id

    def stopped(self, there: There, op: Op) -> int:
        """The same, of a peer that was stopped in its midst; one that was too fast is done again.

        What the peer had sent before may end an operation a moment later.
        """
        for _ in range(20):
            op_id = self.moving(there, op)
            there.signal(signal.SIGSTOP)
            wait_stopped(there.child.pid)
            end = time.monotonic() + QUIET_S
            self.poll(lambda: op_id in self.ended or time.monotonic() > end)  # noqa: B023
            if op_id not in self.ended:
                return op_id
            there.signal(signal.SIGCONT)
        raise AssertionError("each operation has ended before its peer was stopped")


@pytest.fixture
def here(name: str, sections: dict[str, dict[str, Any]]) -> Iterator[Here]:
    made = Here(name, sections[name])
    yield made
    made.transport.close()


@pytest.fixture
def start(here: Here) -> Iterator[Callable[[str, int], There]]:
    with ExitStack() as stack:

        def start(name: str, nbytes: int) -> There:
            there = There(here, name, nbytes)
            stack.callback(there.child.__exit__, None, None, None)  # not `there`, which holds memory of its own
            return there

        yield start


@pytest.mark.parametrize("op", Op)
def test_a_peer_killed_in_mid_transfer(here: Here, start: Any, keep: Any, name: str, op: Op) -> None:
    victim, other = start("victim", BIG), start("other", SMALL)
    here.copy(other, Op.WRITE, 1)
    op_id = here.moving(victim, op)
    victim.signal(signal.SIGKILL)
    seconds = here.poll(lambda: op_id in here.ended)
    ended = here.ended[op_id]
    if isinstance(ended, OpFailed):  # else all of it had moved before the signal
        assert ended.reason is Reason.TRANSPORT
    keep("nixl-faults", f"{name} {op.value} killed", seconds=seconds, outcome=repr(ended))
    for sample, again in enumerate((Op.WRITE, Op.READ), 2):
        here.copy(other, again, sample)
    here.copy(start("victim", SMALL), Op.WRITE, 4)


@pytest.mark.parametrize("op", Op)
def test_a_peer_stopped_in_mid_transfer_is_waited_for_and_nobody_else(
    here: Here, start: Any, keep: Any, name: str, op: Op
) -> None:
    victim, other = start("victim", BIG), start("other", SMALL)
    here.copy(other, Op.WRITE, 1)
    here.big.fill(7)
    victim.child.ask({"fill": 7})
    op_id = here.stopped(victim, op)
    try:
        for sample in range(2, 6):
            here.copy(other, (Op.WRITE, Op.READ)[sample % 2], sample)
        assert op_id not in here.ended, "a stopped peer has ended an operation"
    finally:
        victim.signal(signal.SIGCONT)
    seconds = here.poll(lambda: op_id in here.ended)
    assert isinstance(here.ended[op_id], OpDone), here.ended[op_id]
    assert here.big.matches(7) if op is Op.READ else victim.child.ask({"check": 7})["matches"]
    keep("nixl-faults", f"{name} {op.value} stopped", seconds_after_continue=seconds, outcome=repr(here.ended[op_id]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_and_restart_rounds_leave_nothing_behind(here: Here, start: Any, keep: Any, name: str) -> None:
    busy, rested = [], []
    for number in range(1, ROUNDS + 1):
        there = start("victim", SMALL)
        here.copy(there, Op.WRITE, 2 * number)
        here.copy(there, Op.READ, 2 * number + 1)
        there.signal(signal.SIGKILL)
        there.end()
        busy.append({"round": number, "agents": len(here.transport._crew._known), **_resources()})
        if number % (ROUNDS // 4) == 0:  # agents of those who have left are forgotten
            here.poll(lambda: not here.transport._crew._known)
            rested.append({"round": number, "agents": 0, **_resources()})
    early, late = rested[0], rested[-1]
    keep("nixl-faults", f"{name} rounds", rounds=ROUNDS, busy=busy[:: ROUNDS // 4], rested=rested)
    assert late["descriptors"] <= early["descriptors"]
    assert late["threads"] <= early["threads"]
    assert late["rss_kib"] <= early["rss_kib"] + 16 * (ROUNDS - ROUNDS // 4)


def _resources() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "rss_kib": int(status["VmRSS"].split()[0]),
    }
