"""Transport cases: what is declared and registered, what it costs, and that rest costs nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from kvx.core.events import OpFailed
from kvx.core.model import Capabilities, Op, Peer, Region, Stamp
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.ground import MIB
from kvx_conformance.suite.ops import declared_ops, each_op, piece, some_op
from kvx_conformance.suite.ranks import EPOCH, KIB, Rank, Rig
from kvx_conformance.suite.subject import Feature

BLOCKED_S = 0.2
"""A `poll` that takes this long, again and again, waits for something."""
WORK_S = 0.25
GROWTH_BYTES = 24 * MIB


@case("KVX-TRN-001", "declaration", "What is declared is whole, and the same before, during and after use.")
def declaration(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * KIB)
    before = a.value("capabilities")
    context.check(isinstance(before, Capabilities), f"`capabilities` is a {type(before).__name__}")
    context.check(before.ops, "no operation is declared")
    context.check(before.memory, "no kind of memory is declared")
    context.check(before.max_descriptors >= 1, f"max_descriptors is {before.max_descriptors}")
    context.check(before.max_in_flight >= 1, f"max_in_flight is {before.max_in_flight}")
    pause_s = a.value("idle_poll_s")
    context.check(a.fileno() is not None or (pause_s or 0) > 0, "neither `fileno` nor `idle_poll_s` says when to poll")
    rig.finish(rig.post(a, b, some_op(context), piece(0, 4096), piece(0, 4096)))
    context.check(a.value("capabilities") == before, f"{before} became {a.value('capabilities')}")
    a.close()
    context.check(a.value("capabilities") == before, f"{before} became {a.value('capabilities')} after `close`")


@case("KVX-TRN-003", "device", "`register` of memory of a kind that is not declared.")
def device(context: Context) -> None:
    rig = Rig.of(context)
    rank = rig.bare("a", 64 * KIB)
    text = rank.refusal("register", rank.ground.regions("no-such-memory:0"))
    context.check(text, "memory of the kind `no-such-memory` was registered")


@case("KVX-TRN-003", "index-twice", "`register` of two regions with one index.")
def index_twice(context: Context) -> None:
    rig = Rig.of(context)
    rank = rig.bare("a", 4096, 4096)
    one, two = rank.ground.regions()
    text = rank.refusal("register", [one, Region(one.index, two.base, two.length)])
    context.check(text, "two regions with one index were registered")


@case("KVX-TRN-003", "second-call", "`register` a second time.")
def second_call(context: Context) -> None:
    rig = Rig.of(context)
    rank = rig.rank("a", 64 * KIB)
    text = rank.refusal("register", rank.ground.regions())
    context.check(text, "a second `register` was accepted")


def _held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _round(context: Context, number: int) -> None:
    """A pair from its making to its end: good operations, refused ones and, where that can be, cancelled ones."""
    rig = Rig(context)
    try:
        a, b = rig.pair(256 * KIB)
        for op in declared_ops(context):
            shown = Stamp(f"{op.value}{number}", EPOCH, 3)
            rig.finish(rig.post(a, b, op, piece(0, 100_000), piece(64, 100_000), stamp=shown))
            wrong = a.post(b.peer, op, piece(0, 64), piece(256 * KIB, 64))
            rig.until(lambda wrong=wrong: wrong in a.ended, "an impossible operation ends")  # type: ignore[misc]
            if Feature.CANCEL in context.features:
                move = rig.post(a, b, op, piece(0, 100_000), piece(64, 100_000), stamp=Stamp(f"c{number}", EPOCH, 3))
                a.call("cancel", move.op_id)
                rig.ended(move)
    finally:
        for rank in rig.ranks:
            rank.close()


def _rounds(context: Context, count: int) -> None:
    for number in range(3):
        _round(context, number)
    descriptors, threads = _held()
    for number in range(count):
        _round(context, number)
    now = _held()
    context.check(now[0] <= descriptors, f"{now[0] - descriptors} more descriptors after {count} rounds than before")
    context.check(now[1] <= threads, f"{now[1] - threads} more threads after {count} rounds than before")


@case(
    "KVX-TRN-030", "ten-rounds", "Ten pairs are made, used and closed: descriptors and threads are as many as before."
)
def ten_rounds(context: Context) -> None:
    _rounds(context, 10)


@case(
    "KVX-TRN-030",
    "hundred-rounds",
    "A hundred pairs are made, used and closed: descriptors and threads are as many as before.",
    profile=Profile.RESILIENCE,
    limit_s=120.0,
)
def hundred_rounds(context: Context) -> None:
    _rounds(context, 100)


@each_op("KVX-TRN-030", "two-hundred", "Two hundred {op}s of one pair, every fourth impossible: no descriptor more.")
def two_hundred(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * KIB)

    def some(count: int) -> None:
        for number in range(count):
            if number % 4 == 3:
                wrong = a.post(b.peer, op, piece(0, 64), piece(64 * KIB, 64))
                rig.until(lambda wrong=wrong: wrong in a.ended, "an impossible operation ends")  # type: ignore[misc]
            else:
                rig.finish(rig.post(a, b, op, piece(0, 8000), piece(100, 8000)))

    some(20)
    before = _held()
    some(200)
    now = _held()
    context.check(now[0] <= before[0], f"{now[0] - before[0]} more descriptors after 200 operations")
    context.check(now[1] <= before[1], f"{now[1] - before[1]} more threads after 200 operations")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@case(
    "KVX-TRN-031",
    "hundred-rounds",
    "Resident memory after a hundred rounds is at most 24 MiB above that after twenty.",
    profile=Profile.SOAK,
    limit_s=180.0,
)
def memory(context: Context) -> None:
    for number in range(20):
        _round(context, number)
    before = _resident()
    for number in range(100):
        _round(context, number)
    grown = _resident() - before
    context.check(grown <= GROWTH_BYTES, f"{grown >> 20} MiB more after a hundred rounds")


@case("KVX-TRN-032", "at-rest", "`poll` of a pair at rest, and of one whose peer stands still: it returns at once.")
def poll_returns(context: Context) -> None:
    rig, op = Rig.of(context), some_op(context)
    a, b = rig.pair(4 * MIB, warm=True)
    _polled(context, rig, "at rest")
    rig.post(a, b, op, a.ground.whole(), b.ground.whole(), stamp=Stamp("still", EPOCH, 3))
    began = time.monotonic()
    for _ in range(20):
        a.poll()
    spent = time.monotonic() - began
    limit_s = 20 * BLOCKED_S * context.pace
    context.check(spent < limit_s, f"20 calls of `poll` took {spent:.1f} s while the peer stood still")
    rig.until(lambda: a.in_flight == 0, "the operation ends")
    b.ground.due[:] = b.ground.memory
    a.ground.due[:] = a.ground.memory


def _polled(context: Context, rig: Rig, when: str) -> None:
    for rank in rig.ranks:
        began = time.monotonic()
        for _ in range(10):
            rank.poll()
        spent = time.monotonic() - began
        context.check(spent < 10 * BLOCKED_S * context.pace, f"10 calls of `poll` took {spent:.1f} s {when}")


def _longest_poll(context: Context, rig: Rig, a: Rank, b: Rank, op: Op, stamp: Stamp) -> float:
    """Seconds of the longest call in one operation on all memory."""
    move = rig.post(a, b, op, a.ground.whole(), b.ground.whole(), stamp=stamp)
    longest = 0.0
    end = time.monotonic() + 15 * context.pace
    while move.end is None and time.monotonic() < end:
        for rank in (a, b):
            began = time.monotonic()
            rank.poll()
            longest = max(longest, time.monotonic() - began)
    rig.finish(move)
    return longest


@each_op("KVX-TRN-033", "large", "No call of `poll` in a {op} of 64 MiB takes longer than a quarter of a second.")
def bounded_work(context: Context, op: Op) -> None:
    rig, limit_s = Rig.of(context), WORK_S * context.pace
    a, b = rig.pair(64 * MIB, warm=True)
    # A process that waits for a processor is no transport that works for long: that one is slow each time.
    longest = limit_s
    for number in range(3):
        if longest >= limit_s:
            longest = _longest_poll(context, rig, a, b, op, Stamp(f"large {number}", EPOCH, 3))
    context.check(longest < limit_s, f"in each of three operations a call of `poll` took {longest:.2f} s or more")


@case("KVX-TRN-034", "rest", "A pair that has exchanged something is left alone for half a second.")
def rest(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(MIB, warm=True)
    for op in declared_ops(context):
        rig.finish(rig.post(a, b, op, piece(0, 500_000), piece(0, 500_000), stamp=Stamp(op.value, EPOCH, 3)))
    rig.linger(wait_s=0.1)
    for rank in (a, b):
        rig.rests(rank)


@case("KVX-TRN-034", "told-without-traffic", "An operation to nobody fails: `fileno` says so, although nothing moves.")
def told_without_traffic(context: Context) -> None:
    rig = Rig.of(context)
    a, _ = rig.pair(64 * KIB, warm=True)
    rig.linger()
    for _ in range(20):
        op_id = a.post(Peer("nobody", 0), some_op(context), piece(0, 64), piece(0, 64))
        rig.until(lambda op_id=op_id: op_id in a.ended, "an operation to nobody ends", a)  # type: ignore[misc]
        context.check(isinstance(a.ended[op_id], OpFailed), f"an operation to nobody was told as {a.ended[op_id]}")


@case(
    "KVX-TRN-034",
    "waiting",
    "A pair whose operation waits for a peer that stands still is left alone for half a second.",
)
def waiting(context: Context) -> None:
    rig, op = Rig.of(context), some_op(context)
    a, b = rig.pair(16 * MIB, warm=True)
    move = rig.post(a, b, op, a.ground.whole(), b.ground.whole())
    rig.linger(a, wait_s=0.3)
    rig.rests(a)
    rig.finish(move)
