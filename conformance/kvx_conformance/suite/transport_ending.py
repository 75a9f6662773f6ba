"""Transport cases: cancel, fence and close, at each step; after an end nothing moves any more."""

from __future__ import annotations

from kvx.core.events import Fenced, OpFailed
from kvx.core.model import FenceScope, Op, Stamp
from kvx_conformance.suite.case import Context, NotExercised, case
from kvx_conformance.suite.ground import MIB
from kvx_conformance.suite.ops import each_op, piece, some_op
from kvx_conformance.suite.ranks import EPOCH, KIB, SIZES, STAMP, STEPS, Move, Rank, Rig, introduce
from kvx_conformance.suite.subject import Feature


def _over(rig: Rig, move: Move, *grounds: Rank) -> None:
    """It has ended. If it failed, each byte is an old or a new one, and from now on the memory is somebody else's."""
    if move.done:
        rig.good(move)
    else:
        rig.partial(move, "when OpFailed was told")
        for rank in grounds:
            rig.poison(rank.ground)
        rig.linger()
    rig.intact("after its end")


@each_op(
    "KVX-TRN-013",
    "cancelled",
    "{op}s of 2 MiB cancelled at each step: what failed moves nothing more.",
    needs=[Feature.CANCEL],
)
def cancelled(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(2 * MIB, warm=True)
    for step in STEPS:
        shown = Stamp(f"step {step}", EPOCH, 3)
        move = rig.post(a, b, op, a.ground.whole(), b.ground.whole(), stamp=shown)
        rig.turn(times=step)
        a.call("cancel", move.op_id)
        rig.ended(move)
        _over(rig, move, a, b)


@each_op(
    "KVX-TRN-021",
    "midway",
    "A large {op} is cancelled in its midst, and ends before all of it has moved.",
    needs=[Feature.CANCEL],
)
def cancel_midway(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    for size in SIZES:
        move = rig.midway(op, size)
        a, b = move.initiator, rig.rank_of(move.target)
        a.call("cancel", move.op_id)
        rig.ended(move)
        left = bool((move.ground.memory != move.landed()).any())
        _over(rig, move, a, b)
        if left:
            return
        rig.discard(a, b)
    raise NotExercised("even the largest operation was over when it was cancelled")


@each_op(
    "KVX-TRN-021",
    "queued",
    "Four times `max_in_flight` {op}s (up to 512) are posted, and the later half cancelled before any has begun.",
    needs=[Feature.CANCEL],
)
def cancel_queued(context: Context, op: Op) -> None:
    rig, half = Rig.of(context), min(2 * context.declared.max_in_flight, 256)
    a, b = rig.pair(2 * half * 4096, warm=True)
    moves = [rig.post(a, b, op, piece(at * 4096, 4000), piece(at * 4096, 4000)) for at in range(2 * half)]
    for move in reversed(moves[half:]):
        a.call("cancel", move.op_id)
    rig.ended(*moves)
    for move in moves:
        if move.done or move in moves[:half]:
            rig.good(move)
    late = [move for move in moves[half:] if not move.done]
    context.check(late, f"{half} operations were cancelled before they could begin, and all of them were done")
    for move in late:
        rig.partial(move, "when OpFailed was told")
    rig.intact("after half of a queue was cancelled")


@case(
    "KVX-TRN-021",
    "nothing-in-flight",
    "Cancelling what has ended, what was never posted, and twice.",
    needs=[Feature.CANCEL],
)
def nothing_in_flight(context: Context) -> None:
    rig, op = Rig.of(context), some_op(context)
    a, b = rig.pair(64 * KIB, warm=True)
    before = rig.post(a, b, op, piece(0, 4096), piece(0, 4096))
    rig.finish(before)
    for op_id in (before.op_id, 999_999, before.op_id):
        a.call("cancel", op_id)
    rig.linger()
    rig.finish(rig.post(a, b, op, piece(4096, 4096), piece(4096, 4096)))


@each_op("KVX-TRN-022", "goes-on", "`cancel` in the midst of {op}, where it is not declared.", lacks=[Feature.CANCEL])
def cancel_undeclared(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    move.initiator.call("cancel", move.op_id)
    rig.finish(move)


def _fence(rig: Rig, b: Rank, a: Rank, generation: int) -> None:
    due = Fenced(a.peer, generation)
    b.call("fence", a.peer, generation)
    rig.until(lambda: due in b.answers, f"{due} follows")


@each_op(
    "KVX-TRN-023",
    "generations",
    "{op}s of older, equal and newer generations after a fence, by two peers.",
    needs=[Feature.FENCE],
)
def generations(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b, c = rig.rank("a"), rig.rank("b"), rig.rank("c")
    introduce(a, b, c)
    rig.finish(rig.post(a, b, op, piece(0, 4096), piece(0, 4096)))
    _fence(rig, b, a, 4)
    for generation in (0, 1, 3):
        shown = Stamp("old", EPOCH, generation)
        b.permit(shown.transfer, None, op, b.ground.whole(), shown)
        op_id = a.post(b.peer, op, piece(0, 4096), piece(4096, 4096), shown)
        rig.until(lambda op_id=op_id: op_id in a.ended, "an operation of an old generation ends")  # type: ignore[misc]
        end = a.ended[op_id]
        context.check(isinstance(end, OpFailed), f"generation {generation} was admitted after a fence at 4: {end}")
        rig.intact("after an operation of an old generation")
    for generation in (4, 5):
        rig.finish(rig.post(a, b, op, piece(0, 4096), piece(8192, 4096), stamp=Stamp("new", EPOCH, generation)))
    rig.finish(rig.post(c, b, op, piece(0, 4096), piece(16_384, 4096)))


@each_op(
    "KVX-TRN-023",
    "midway",
    "A fence in the midst of a large {op}: no byte moves once it is told.",
    needs=[Feature.FENCE],
)
def fence_midway(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    _fence(rig, b, a, STAMP.generation + 1)
    rig.partial(move, "when Fenced was told")
    rig.poison(b.ground)
    rig.ended(move)
    rig.linger()
    context.check(not move.done, "an operation of an old generation was done after the fence")
    if op is Op.WRITE:
        rig.intact("after the fence")
    else:
        rig.unseen(move, "after the fence")


@case(
    "KVX-TRN-023",
    "never-sinks",
    "A fence at 9 and then one at 4: generation 8 stays refused, 9 is admitted.",
    needs=[Feature.FENCE],
)
def never_sinks(context: Context) -> None:
    rig, op = Rig.of(context), some_op(context)
    a, b = rig.pair(64 * KIB, warm=True)
    for generation in (9, 4):
        _fence(rig, b, a, generation)
    shown = Stamp("between", EPOCH, 8)
    b.permit(shown.transfer, a.peer, op, b.ground.whole(), shown)
    op_id = a.post(b.peer, op, piece(0, 4096), piece(4096, 4096), shown)
    rig.until(lambda: op_id in a.ended, "an operation of an old generation ends")
    end = a.ended[op_id]
    context.check(isinstance(end, OpFailed), f"generation 8 was admitted after a fence at 9 and one at 4: {end}")
    rig.intact("after an operation of an old generation")
    rig.finish(rig.post(a, b, op, piece(0, 4096), piece(4096, 4096), stamp=Stamp("new", EPOCH, 9)))


@each_op(
    "KVX-TRN-023",
    "others",
    "A fence against one peer in the midst of {op}s of two: the other's is done.",
    needs=[Feature.FENCE],
)
def others(context: Context, op: Op) -> None:
    rig, half = Rig.of(context), 4 * MIB
    a, b, c = (rig.rank(name, 2 * half) for name in "abc")
    introduce(a, b, c)
    for rank in (a, c):
        rig.warm(rank, b)
    fenced = rig.post(a, b, op, piece(0, half), piece(0, half), stamp=Stamp("fenced", EPOCH, 3))
    beside = rig.post(c, b, op, piece(0, half), piece(half, half), stamp=Stamp("beside", EPOCH, 3))
    rig.turn(times=2)
    _fence(rig, b, a, 4)
    rig.ended(fenced, beside)
    rig.good(beside)
    if fenced.done:
        rig.good(fenced)
    else:
        rig.partial(fenced, "after the fence")
    rig.intact("after a fence against another peer")


@each_op("KVX-TRN-024", "goes-on", "`fence` in the midst of {op}, where there is none.", lacks=[Feature.FENCE])
def fence_undeclared(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    b = rig.rank_of(move.target)
    b.call("fence", move.initiator.peer, STAMP.generation + 1)
    if context.declared.fence is FenceScope.NONE:
        rig.finish(move)
        rig.linger(wait_s=0.1)
        told = [one for one in b.answers if isinstance(one, Fenced)]
        context.check(not told, f"{told} was told, and no fence is declared")
    else:
        rig.ended(move)
        _over(rig, move, b)


@each_op("KVX-TRN-029", "initiator", "The initiator closes in the midst of {op}; the target's memory is used at once.")
def initiator_closes(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    a.close()
    a.close()
    rig.partial(move, "after `close`")
    if op is Op.READ:
        rig.poison(a.ground)
    rig.linger(b, wait_s=0.2)
    if op is Op.READ:
        rig.intact("after the initiator's `close`")
    else:
        rig.partial(move, "after the initiator's `close`")


@each_op("KVX-TRN-029", "target", "The target closes in the midst of {op}: it fails, and nothing moves any more.")
def target_closes(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    b.close()
    b.close()
    rig.partial(move, "after `close`")
    rig.poison(b.ground)
    rig.ended(move)
    rig.linger(a)
    context.check(not move.done, "an operation was done although its target had closed in its midst")
    if op is Op.WRITE:
        rig.intact("after the target's `close`")
    else:
        rig.unseen(move, "after the target's `close`")


@case("KVX-TRN-029", "idle", "`close` of a pair at rest, one of a rank that never did anything, and again.")
def close_idle(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(warm=True)
    lone = rig.rank("lone")
    bare = rig.bare("bare")
    for rank in (a, b, lone, bare):
        rank.close()
        rank.close()
    rig.intact("after `close`")
