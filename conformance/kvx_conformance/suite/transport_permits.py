"""Transport cases: what a target admits and what it keeps out, and that `forbid` is in force when it is told."""

from __future__ import annotations

from attrs import evolve

from kvx.core.events import Forbidden, OpFailed
from kvx.core.model import Descriptors, Op, Peer, Stamp
from kvx_conformance.suite.case import Context, NotExercised
from kvx_conformance.suite.ground import MIB
from kvx_conformance.suite.ops import each_op, piece
from kvx_conformance.suite.ranks import EPOCH, KIB, STAMP, STEPS, Move, Rank, Rig, introduce
from kvx_conformance.suite.subject import Feature

SIZE = 64 * KIB
_WHERE = piece(4096, 8192)


def _denied(rig: Rig, a: Rank, b: Rank, op: Op, stamp: Stamp, what: str, where: Descriptors = _WHERE) -> None:
    """This operation, which is not permitted, fails and moves nothing."""
    op_id = a.post(b.peer, op, where, where, stamp)
    rig.until(lambda: op_id in a.ended, f"an operation {what} ends")
    rig.context.check(isinstance(a.ended[op_id], OpFailed), f"an operation {what} was told as {a.ended[op_id]}")
    rig.intact(f"after an operation {what}")


@each_op("KVX-TRN-014", "no-permit", "{op} of a transfer that nobody has permitted.", needs=[Feature.FORBID])
def no_permit(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    _denied(rig, a, b, op, Stamp("never", EPOCH, 3), "that was never permitted")


@each_op(
    "KVX-TRN-014",
    "stamp",
    "{op}s that show another transfer, epoch or generation than was permitted, above and below.",
    needs=[Feature.FORBID],
)
def stamp(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    right = Stamp("right", EPOCH, 3)
    b.permit(right.transfer, a.peer, op, b.ground.whole(), right)
    others = ("righ", "right1", "RIGHT", "")
    wrong = [evolve(right, transfer=other) for other in others if other]
    wrong += [evolve(right, epoch=epoch) for epoch in (EPOCH - 1, EPOCH + 1, 0)]
    wrong += [evolve(right, generation=generation) for generation in (2, 4, 0)]
    for one in wrong:
        _denied(rig, a, b, op, one, f"that shows {one} where {right} is permitted")
    rig.finish(rig.post(a, b, op, _WHERE, _WHERE, stamp=right, permit=False))


@each_op("KVX-TRN-014", "peer", "{op} by a rank that is not the one that was permitted.", needs=[Feature.FORBID])
def peer(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    for other in (Peer("c", 0), Peer(a.peer.instance, 1), b.peer):
        shown = Stamp(f"of {other}", EPOCH, 3)
        b.permit(shown.transfer, other, op, b.ground.whole(), shown)
        _denied(rig, a, b, op, shown, f"of {a.peer} where {other} is permitted")


@each_op("KVX-TRN-014", "anybody", "{op} by a rank where any peer is permitted.", needs=[Feature.FORBID])
def anybody(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    shown = Stamp("anybody", EPOCH, 3)
    b.permit(shown.transfer, None, op, b.ground.whole(), shown)
    rig.finish(rig.post(a, b, op, _WHERE, _WHERE, stamp=shown, permit=False))


@each_op(
    "KVX-TRN-014",
    "other-operation",
    "{op} where only the other operation is permitted.",
    needs=[Feature.FORBID, Feature.WRITE, Feature.READ],
)
def other_operation(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    other = Op.READ if op is Op.WRITE else Op.WRITE
    shown = Stamp("other", EPOCH, 3)
    b.permit(shown.transfer, a.peer, other, b.ground.whole(), shown)
    _denied(rig, a, b, op, shown, f"that is a {op.value.upper()} where a {other.value.upper()} is permitted")


@each_op(
    "KVX-TRN-014",
    "ranges",
    "{op}s that begin one byte before, end one byte behind, or cross a hole in what is permitted.",
    needs=[Feature.FORBID],
)
def ranges(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    shown = Stamp("ranges", EPOCH, 3)
    permitted = Descriptors.of([(0, 1000, 1000), (0, 3000, 1000)])
    b.permit(shown.transfer, a.peer, op, permitted, shown)
    for offset, length in ((999, 2), (1999, 2), (1999, 1002), (2000, 1), (3999, 2), (0, SIZE)):
        what = f"on bytes {offset} to {offset + length}, where 1000 to 2000 and 3000 to 4000 are permitted,"
        _denied(rig, a, b, op, shown, what, piece(offset, length))
    good = Descriptors.of([(0, 1000, 1000), (0, 3000, 1000)])
    rig.finish(rig.post(a, b, op, good, good, stamp=shown, permit=False))


@each_op("KVX-TRN-014", "add-up", "{op} over what several calls of `permit` have allowed.", needs=[Feature.FORBID])
def add_up(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    shown = Stamp("parts", EPOCH, 3)
    for at in range(8):
        b.permit(shown.transfer, a.peer, op, piece(at * 4096, 4096), shown)
    rig.finish(rig.post(a, b, op, piece(0, 8 * 4096), piece(0, 8 * 4096), stamp=shown, permit=False))


@each_op(
    "KVX-TRN-014",
    "late",
    "`permit` at each step after {op}s were posted: refused or done whole, nothing between.",
    needs=[Feature.FORBID],
)
def late(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    for step in STEPS:
        shown = Stamp(f"late {step}", EPOCH, 3)
        move = rig.post(a, b, op, _WHERE, _WHERE, stamp=shown, permit=False)
        rig.turn(times=step)
        b.permit(shown.transfer, a.peer, op, _WHERE, shown)
        rig.ended(move)
        if move.done:
            rig.good(move)
        rig.intact("after an operation that was permitted late")
        rig.poison(b.ground)


def forbid(rig: Rig, b: Rank, transfer: str) -> None:
    """Forbid, and see that the very next `poll` says so."""
    b.call("forbid", transfer)
    told = [one.transfer for one in b.poll() if isinstance(one, Forbidden)]
    rig.context.check(transfer in told, f"the `poll` after `forbid` of {transfer} told {told or 'no Forbidden'}")


def _kept_out(rig: Rig, move: Move, b: Rank) -> None:
    """Forbidden is told: the target uses its memory for something else, and nothing of the transfer moves any more."""
    rig.partial(move, "when Forbidden was told")
    rig.poison(b.ground)
    rig.ended(move)
    rig.linger()
    if move.op is Op.WRITE:
        rig.intact("after Forbidden")
    else:
        rig.unseen(move, "after Forbidden")


@each_op("KVX-TRN-015", "before-the-post", "{op} after what was permitted is forbidden.", needs=[Feature.FORBID])
def before_the_post(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    shown = Stamp("gone", EPOCH, 3)
    b.permit(shown.transfer, a.peer, op, b.ground.whole(), shown)
    forbid(rig, b, shown.transfer)
    _denied(rig, a, b, op, shown, "that is forbidden")


@each_op(
    "KVX-TRN-015",
    "each-step",
    "`forbid` at each step of {op}s of 2 MiB, before the first byte to after the end; the blocks are used at once.",
    needs=[Feature.FORBID],
)
def each_step(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(2 * MIB, warm=True)
    for step in STEPS:
        shown = Stamp(f"step {step}", EPOCH, 3)
        move = rig.post(a, b, op, a.ground.whole(), b.ground.whole(), stamp=shown)
        rig.turn(times=step)
        forbid(rig, b, shown.transfer)
        _kept_out(rig, move, b)


@each_op(
    "KVX-TRN-015",
    "after-the-end",
    "`forbid` after {op}s are done, of what was never permitted, and twice; what is permitted again is admitted.",
    needs=[Feature.FORBID],
)
def after_the_end(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    shown = Stamp("again", EPOCH, 3)
    for _ in range(3):
        forbid(rig, b, "never")
        rig.finish(rig.post(a, b, op, _WHERE, _WHERE, stamp=shown))
        forbid(rig, b, shown.transfer)
        _denied(rig, a, b, op, shown, "that is forbidden")
        forbid(rig, b, shown.transfer)
        shown = evolve(shown, generation=shown.generation + 1)


@each_op(
    "KVX-TRN-015",
    "queue",
    "`forbid` while twice `max_in_flight` {op}s (up to 256 of them) are queued: all end, none moves a byte.",
    needs=[Feature.FORBID],
)
def queue(context: Context, op: Op) -> None:
    rig, count = Rig.of(context), min(2 * context.declared.max_in_flight, 256)
    a, b = rig.pair(count * 4096, warm=True)
    moves = [rig.post(a, b, op, piece(at * 4096, 4096), piece(at * 4096, 4096)) for at in range(count)]
    forbid(rig, b, STAMP.transfer)
    for move in moves:
        rig.partial(move, "when Forbidden was told")
    rig.poison(b.ground)
    rig.ended(*moves)
    rig.linger()
    if op is Op.WRITE:
        rig.intact("after Forbidden")
    else:
        for move in moves:
            rig.unseen(move, "after Forbidden")


@each_op("KVX-TRN-015", "midway", "`forbid` in the midst of a large {op}.", needs=[Feature.FORBID])
def midway(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    b = rig.rank_of(move.target)
    forbid(rig, b, "t")
    _kept_out(rig, move, b)
    if move.done:
        raise NotExercised("the operation was over when it was forbidden")


@each_op(
    "KVX-TRN-015",
    "others-go-on",
    "One of two {op}s of one peer is forbidden; the other ends well.",
    needs=[Feature.FORBID],
)
def others_go_on(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b, c = rig.rank("a", 8 * MIB), rig.rank("b", 8 * MIB), rig.rank("c", 8 * MIB)
    introduce(a, b, c)
    shown = [Stamp(name, EPOCH, 3) for name in ("one", "other", "third")]
    half = 4 * MIB
    lost = rig.post(a, b, op, piece(0, half), piece(0, half), stamp=shown[0])
    kept = rig.post(a, b, op, piece(half, half), piece(half, half), stamp=shown[1])
    beside = rig.post(c, b, op, piece(0, 64), piece(half - 64, 64), stamp=shown[2]) if op is Op.READ else None
    rig.turn(times=3)
    forbid(rig, b, "one")
    moves = [lost, kept, *([beside] if beside else [])]
    rig.ended(*moves)
    for move in moves[1:]:
        rig.good(move)
    rig.partial(lost, "after Forbidden")
    rig.intact("after one of two was forbidden")


@each_op("KVX-TRN-016", "goes-on", "`forbid` in the midst of {op}, where access is by region.", lacks=[Feature.FORBID])
def goes_on(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    b = rig.rank_of(move.target)
    b.call("forbid", "t")
    rig.finish(move)
    rig.linger(wait_s=0.1)
    told = [one for one in b.answers if isinstance(one, Forbidden)]
    context.check(not told, f"Forbidden was told of {told}, and access is by region")
