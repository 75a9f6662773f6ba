"""Transport cases with a peer that is a process of its own: one that stops, goes on, dies, and comes again."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvx.core.events import Forbidden, OpFailed
from kvx.core.model import Op, Stamp
from kvx_conformance.suite import peer_process
from kvx_conformance.suite.case import Context, NotExercised, Profile, case
from kvx_conformance.suite.ground import MIB
from kvx_conformance.suite.ops import each_op, piece, some_op
from kvx_conformance.suite.peer_process import PeerProcess
from kvx_conformance.suite.ranks import EPOCH, KIB, SIZES, STAMP, Move, Rank, Rig
from kvx_conformance.suite.subject import Feature

DEATH_S = 30.0
"""How long a transport may take to notice that a peer's process is gone."""
BLOCKED_S = 0.1
"""A `poll` that never takes less waits for something."""
_TRIES = 8
_STILL_S = 0.3


def _pair(rig: Rig, size: int) -> tuple[Rank, PeerProcess]:
    """A rank here and one in a process of its own, that know each other and have exchanged something."""
    here, there = rig.rank("here", size), peer_process.start(rig, "there", size)
    here.learn(there)
    there.learn(here)
    first = piece(0, 64)
    rig.finish(rig.post(here, there, some_op(rig.context), first, first, stamp=Stamp("first", EPOCH, 3)))
    return here, there


def _midway(rig: Rig, op: Op, size: int = SIZES[1]) -> tuple[Rank, PeerProcess, Move]:
    """An operation of this process on the memory of another, all but its last MiB, whose first bytes have landed."""
    here, there = _pair(rig, size)
    most = piece(0, size - MIB)
    for number in range(_TRIES):
        move = rig.post(here, there, op, most, most, stamp=Stamp(f"midway {number}", EPOCH, 3))
        rig.begins(move)
        if move.end is None:
            return here, there, move
        rig.good(move)
        rig.poison(here.ground)  # the next one shall be seen to begin
    raise NotExercised(f"{_TRIES} operations were over before their middle could be seen")


def _written(rig: Rig, size: int = SIZES[1]) -> tuple[Rank, PeerProcess, int]:
    """A WRITE of another process on memory of this one, whose first bytes have landed; the operation's id there."""
    here, there = _pair(rig, size)
    here.permit(STAMP.transfer, there.peer, Op.WRITE, here.ground.whole(), STAMP)
    op_id = there.post(here.peer, Op.WRITE, there.ground.whole(), here.ground.whole(), STAMP)
    whole = here.ground.whole()
    rig.until(lambda: here.ground.touched(whole), "the operation begins", turn_s=0.001)
    return here, there, op_id


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _ends(rig: Rig, move: Move, what: str) -> None:
    rig.until(lambda: move.end is not None, what, limit_s=DEATH_S)


@each_op("KVX-TRN-012", "other-process", "Ten {op}s on memory of another process: all bytes are there when it is told.")
def other_process(context: Context, op: Op) -> None:
    rig, rng = Rig.of(context), context.rng
    here, there = _pair(rig, 512 * KIB)
    for number in range(10):
        size = rng.randint(1, 400 * KIB)
        local, remote = piece(rng.randrange(100 * KIB), size), piece(rng.randrange(100 * KIB), size)
        rig.finish(rig.post(here, there, op, local, remote, stamp=Stamp(f"t{number}", EPOCH, 3)))


@case(
    "KVX-TRN-012",
    "by-other-process",
    "Ten WRITEs by another process: all bytes are here when it is told.",
    needs=[Feature.WRITE],
)
def by_other_process(context: Context) -> None:
    rig, rng = Rig.of(context), context.rng
    here, there = _pair(rig, 512 * KIB)
    for number in range(10):
        size, stamp = rng.randint(1, 400 * KIB), Stamp(f"t{number}", EPOCH, 3)
        local, remote = piece(rng.randrange(100 * KIB), size), piece(rng.randrange(100 * KIB), size)
        here.permit(stamp.transfer, there.peer, Op.WRITE, remote, stamp)
        op_id = there.post(here.peer, Op.WRITE, local, remote, stamp)
        there.until(lambda told, op_id=op_id: op_id in told.done + told.failed, "a WRITE of another process ends")  # type: ignore[misc]
        context.check(op_id in there.told.done, "a good WRITE of another process failed")
        here.ground.due = here.ground.with_bytes(remote, there.ground.take(local))
        rig.intact("when a WRITE of another process was told there")


@each_op(
    "KVX-TRN-012",
    "stopped-target",
    "The target's process is stopped in the midst of {op} and goes on: OpDone is told when all bytes are there.",
    profile=Profile.RESILIENCE,
    limit_s=60.0,
)
def stopped_target(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    _, there, move = _midway(rig, op)
    there.stop()
    rig.linger(wait_s=_STILL_S)
    if move.end is None:
        rig.partial(move, "while its target stood still")
        there.go_on()
    else:
        there.go_on()
    rig.finish(move)


@each_op(
    "KVX-TRN-011",
    "killed-target",
    "The target's process is killed in the midst of {op}: it fails, once, and further ones fail.",
    profile=Profile.RESILIENCE,
    limit_s=90.0,
)
def killed_target(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    here, there, move = _midway(rig, op)
    there.kill()
    _ends(rig, move, "an operation whose target has died ends")
    context.check(isinstance(move.end, OpFailed), f"an operation whose target has died was told as {move.end}")
    rig.partial(move, "when its target had died")
    rig.poison(here.ground)
    again = here.post(there.peer, op, piece(0, 64), piece(0, 64))
    rig.until(lambda: again in here.ended, "an operation to a dead peer ends", limit_s=DEATH_S)
    end = here.ended[again]
    context.check(isinstance(end, OpFailed), f"an operation to a dead peer was told as {end}")
    rig.linger(wait_s=_STILL_S)
    rig.intact("after the death of a target")


@case(
    "KVX-TRN-015",
    "killed-writer",
    "A writer's process is killed in the midst of its WRITE; what it had is forbidden, and another one writes.",
    profile=Profile.RESILIENCE,
    needs=[Feature.FORBID, Feature.WRITE],
    limit_s=60.0,
)
def killed_writer(context: Context) -> None:
    rig = Rig.of(context)
    here, there, _ = _written(rig)
    there.kill()
    _forbidden(rig, here, there)
    rig.linger(wait_s=_STILL_S)
    rig.intact("after a writer's death")
    other = rig.rank("other", MIB)
    other.learn(here)
    here.learn(other)
    rig.finish(rig.post(other, here, Op.WRITE, piece(0, MIB), piece(99, MIB), stamp=Stamp("other", EPOCH, 3)))


@case(
    "KVX-TRN-015",
    "stopped-writer",
    "A writer's process is stopped in the midst of its WRITE, forbidden, and goes on: no byte lands any more.",
    profile=Profile.RESILIENCE,
    needs=[Feature.FORBID, Feature.WRITE],
    limit_s=60.0,
)
def stopped_writer(context: Context) -> None:
    rig = Rig.of(context)
    here, there, op_id = _written(rig)
    there.stop()
    _forbidden(rig, here, there)
    there.go_on()
    there.until(lambda told: op_id in told.done + told.failed, "a forbidden WRITE of another process ends")
    rig.linger(wait_s=_STILL_S)
    rig.intact("after a forbidden writer went on")


def _forbidden(rig: Rig, here: Rank, there: PeerProcess) -> None:
    """Forbid what the other process writes; it comes at once, and the memory is somebody else's."""
    whole = here.ground.whole()
    if np.array_equal(here.ground.memory, here.ground.with_bytes(whole, there.ground.take(whole))):
        raise NotExercised("the writer was through before it could be stopped")
    here.call("forbid", STAMP.transfer)
    told = here.poll()
    rig.context.check(Forbidden(STAMP.transfer) in told, f"the `poll` after `forbid` told {told}")
    rig.poison(here.ground)


@each_op(
    "KVX-TRN-013",
    "stopped-target",
    "{op} is cancelled while its target's process stands still; if it has failed, nothing moves when that goes on.",
    profile=Profile.RESILIENCE,
    needs=[Feature.CANCEL],
    limit_s=60.0,
)
def cancelled_while_stopped(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    here, there, move = _midway(rig, op)
    there.stop()
    here.call("cancel", move.op_id)
    rig.linger(wait_s=_STILL_S)
    told_early = move.end is not None
    if told_early and not move.done:
        rig.partial(move, "when OpFailed was told")
        rig.poison(here.ground)
        rig.poison(there.ground)
    there.go_on()
    rig.ended(move)
    if move.done:
        rig.good(move)
    elif not told_early:
        rig.partial(move, "when OpFailed was told")
        rig.poison(there.ground)
    rig.linger(wait_s=_STILL_S)
    rig.intact("after its end")


@each_op(
    "KVX-TRN-020",
    "stopped-process",
    "{op}s with a peer go on, and `poll` does not block, while another peer's process is stopped.",
    profile=Profile.RESILIENCE,
    limit_s=60.0,
)
def stopped_process(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    here, there, move = _midway(rig, op)
    other = rig.rank("other", MIB)
    other.learn(here)
    here.learn(other)
    there.stop()
    last = piece(SIZES[1] - MIB, MIB)
    for number in range(8):
        away = rig.post(here, other, op, last, piece(0, MIB), stamp=Stamp(f"away {number}", EPOCH, 3))
        rig.ended(away)
        rig.good(away)
        rig.intact("beside a stopped process", other.ground)
    least = min(_timed(here.poll) for _ in range(10))
    context.check(least < BLOCKED_S, f"each `poll` takes {least:.2f} s or more beside a stopped process")
    there.go_on()
    rig.finish(move)


@each_op(
    "KVX-TRN-025",
    "killed-and-started-anew",
    "The target's process is killed in the midst of {op} and started anew under its name: new {op}s work.",
    profile=Profile.RESILIENCE,
    limit_s=120.0,
)
def killed_and_started_anew(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    here, there, move = _midway(rig, op)
    there.kill()
    again = peer_process.start(rig, there.peer.instance, SIZES[1], EPOCH + 1)
    here.learn(again)
    again.learn(here)
    _ends(rig, move, "an operation with the old start ends")
    context.check(not move.done, "an operation with the old start was done")
    rig.partial(move, "when its target had been started anew")
    rig.intact("after a restart", again.ground)
    for number in range(4):
        shown = Stamp(f"new {number}", EPOCH + 1, 0)
        rig.finish(rig.post(here, again, op, piece(0, MIB), piece(number * MIB, MIB), stamp=shown))


@case(
    "KVX-TRN-034",
    "killed-initiator",
    "An initiator's process is killed in the midst of its operation: the target comes to rest.",
    profile=Profile.RESILIENCE,
    needs=[Feature.WRITE],
    limit_s=60.0,
)
def killed_initiator(context: Context) -> None:
    rig = Rig.of(context)
    here, there, _ = _written(rig)
    there.kill()
    rig.linger(wait_s=_STILL_S)
    here.ground.due[:] = here.ground.memory
    rig.rests(here)
    rig.intact("after the initiator's death")
