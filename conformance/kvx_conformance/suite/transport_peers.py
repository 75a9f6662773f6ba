"""Transport cases: many at once, peers that come again, stand still or are not there, and metadata that is no good."""

from __future__ import annotations

from kvx.core.events import OpFailed
from kvx.core.model import Op, Peer, Stamp
from kvx_conformance.suite.case import Context, NotExercised, Profile, case
from kvx_conformance.suite.ground import MIB
from kvx_conformance.suite.ops import declared_ops, each_op, piece, some_op
from kvx_conformance.suite.ranks import EPOCH, KIB, Rig, describe, introduce

AT_ONCE = 256


@each_op(
    "KVX-TRN-017", "more-than-fit", "Three times `max_in_flight` {op}s (up to 256 of them) posted at once: all end."
)
def more_than_fit(context: Context, op: Op) -> None:
    rig, count = Rig.of(context), min(3 * context.declared.max_in_flight, AT_ONCE)
    a, b = rig.pair(AT_ONCE * 4096)
    moves = [rig.post(a, b, op, piece(at * 4096, 4000), piece(at * 4096 + 96, 4000)) for at in range(count)]
    rig.finish(*moves)


@each_op(
    "KVX-TRN-017",
    "in-order",
    "Eight times `max_in_flight` {op}s (up to 1024) of one size: none overtakes those that have to start first.",
)
def in_order(context: Context, op: Op) -> None:
    rig, fit = Rig.of(context), context.declared.max_in_flight
    count = min(8 * fit, 1024)
    a, b = rig.pair(count * 256)
    moves = [rig.post(a, b, op, piece(at * 256, 256), piece(at * 256, 256)) for at in range(count)]
    most = 0

    def over() -> bool:
        nonlocal most
        if a.ended:  # ids rise by one from 1 on, so these are the earlier ones that are still open
            most = max(most, max(a.ended) - len(a.ended))
        return a.in_flight == 0

    rig.until(over, f"each of {count} operations ends")
    rig.finish(*moves)
    context.check(most < fit, f"an operation ended while {most} earlier ones had not, of which {fit} may be in flight")


@case(
    "KVX-TRN-018", "both-ways", "64 operations of odd sizes at the same time: each of three ranks with each, both ways."
)
def both_ways(context: Context) -> None:
    rig, ops = Rig.of(context), declared_ops(context)
    ranks = [rig.rank(name, 2 * MIB) for name in "abc"]
    introduce(*ranks)
    slot, moves = 8 * KIB, []
    for at in range(64):
        a, b = ranks[at % 3], ranks[(at + 1 + at // 3 % 2) % 3]
        here, there = piece(at * slot, 5000 + at), piece(MIB + at * slot, 5000 + at)
        moves.append(rig.post(a, b, ops[at % len(ops)], here, there, stamp=Stamp(f"t{at}", EPOCH, 3)))
    rig.finish(*moves)


@each_op("KVX-TRN-019", "small-beside-large", "A small {op} posted in the midst of a large one with the same peer.")
def small_beside_large(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(48 * MIB, warm=True)
    rest = piece(4096, 47 * MIB)
    large = rig.post(a, b, op, rest, rest)
    rig.until(lambda: large.begun, "the large one begins")
    small = rig.post(a, b, op, piece(0, 4096), piece(0, 4096), stamp=Stamp("small", EPOCH, 3))
    rig.until(lambda: small.end is not None, "the small one ends")
    context.check(small.done, f"the small one ended as {small.end}")
    context.check(large.end is None, "the small one has waited for the end of the large one")
    small.ground.due = small.landed()
    rig.finish(large)


@each_op("KVX-TRN-020", "one-of-two", "{op}s with a peer go on while another peer, with open operations, stands still.")
def one_of_two(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, still, b = rig.rank("a", 4 * MIB), rig.rank("still", 4 * MIB), rig.rank("b", 4 * MIB)
    introduce(a, still, b)
    for other in (still, b):
        rig.warm(a, other)
    half = 2 * MIB
    open_ones = [
        rig.post(a, still, op, piece(at * 4096, 4096), piece(at * 4096, 4096), stamp=Stamp(f"s{at}", EPOCH, 3))
        for at in range(16)
    ]
    for at in range(8):
        move = rig.post(a, b, op, piece(half, MIB), piece(at * 1000, MIB), stamp=Stamp(f"b{at}", EPOCH, 3))
        rig.until(lambda move=move: move.end is not None, "an operation with the other peer ends", a, b)  # type: ignore[misc]
        rig.good(move)
        rig.intact("while another peer stands still", b.ground)
    rig.finish(*open_ones)


@each_op(
    "KVX-TRN-025",
    "target-again",
    "The target is started anew in the midst of {op}: its new memory stays clean, and new {op}s work.",
)
def target_again(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    b.close()
    again = rig.rank(b.peer.instance, MIB, epoch=EPOCH + 1)
    introduce(a, again)
    rig.ended(move)
    rig.linger()
    context.check(not move.done, "an operation with the old start was done")
    rig.partial(move, "when its target had been started anew")
    rig.intact("after a restart", again.ground)
    rig.finish(rig.post(a, again, op, piece(0, 4096), piece(64, 4096), stamp=Stamp("new", EPOCH + 1, 0)))


@each_op(
    "KVX-TRN-025",
    "silent-target-again",
    "As target-again, but the old target still stands there, and says nothing any more.",
)
def silent_target_again(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    again = rig.rank(b.peer.instance, MIB, epoch=EPOCH + 1)
    a.learn(again)
    again.learn(a)
    rig.until(lambda: move.end is not None, "an operation with the old start ends", a, again)
    context.check(not move.done, "an operation with the old start was done")
    rig.intact("after a restart", again.ground)
    new = rig.post(a, again, op, piece(0, 4096), piece(64, 4096), stamp=Stamp("new", EPOCH + 1, 0))
    rig.until(lambda: new.end is not None, "an operation with the new start ends", a, again)
    rig.good(new)
    rig.intact("after an operation with the new start", again.ground)
    b.close()
    rig.partial(move, "when the old target was gone")


@each_op(
    "KVX-TRN-025", "initiator-again", "The initiator is started anew in the midst of {op}, and its new {op}s work."
)
def initiator_again(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    a, b = move.initiator, rig.rank_of(move.target)
    a.close()
    rig.partial(move, "when its initiator was gone")
    again = rig.rank(a.peer.instance, MIB, epoch=EPOCH + 1)
    introduce(again, b)
    if op is Op.WRITE:
        rig.linger(b, again)
        rig.partial(move, "when its initiator was started anew")
    rig.finish(rig.post(again, b, op, piece(0, 4096), piece(64, 4096), stamp=Stamp("new", EPOCH, 4)))


@each_op("KVX-TRN-026", "midway", "Both sides learn of one another again in the midst of {op}, several times.")
def learned_again(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    move = rig.midway(op)
    for _ in range(3):
        introduce(move.initiator, rig.rank_of(move.target))
        rig.turn()
    rig.finish(move)


@case("KVX-TRN-027", "junk", "`connect` with no metadata, with noise, and with each beginning of good metadata.")
def junk(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * KIB, warm=True)
    good = b.metadata()
    shape = describe(Peer("x", 0), EPOCH)
    bad = [b"", b"\0", b"\xff" * 64, context.rng.randbytes(64), context.rng.randbytes(4096)]
    cuts = range(len(good)) if len(good) <= 512 else sorted(context.rng.sample(range(len(good)), 256))
    bad += [good[:cut] for cut in cuts]
    for metadata in bad:
        text = a.refusal("connect", shape, metadata)
        context.check(text, f"metadata {metadata[:24]!r} ({len(metadata)} bytes) was accepted; good is {good[:24]!r}")
    rig.finish(rig.post(a, b, some_op(context), piece(0, 4096), piece(0, 4096)))


@case("KVX-TRN-027", "known-peer", "`connect` with noise for a peer that is known, before and in the midst of use.")
def known_peer(context: Context) -> None:
    rig = Rig.of(context)
    move = rig.midway(some_op(context))
    a, b = move.initiator, rig.rank_of(move.target)
    for metadata in (b"", b"\xff" * 64, context.rng.randbytes(300)):
        text = a.refusal("connect", b.info, metadata)
        context.check(text, f"metadata {metadata[:24]!r} ({len(metadata)} bytes) was accepted for a known peer")
        rig.turn()
    rig.finish(move)
    rig.finish(rig.post(a, b, move.op, piece(0, 4096), piece(0, 4096)))


@case(
    "KVX-TRN-027",
    "flipped",
    "`connect` with metadata of which one bit is wrong: refused or not, but never another error.",
)
def flipped(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * KIB, warm=True)
    good = b.metadata()
    for number in range(200):
        at, bit = context.rng.randrange(len(good)), 1 << context.rng.randrange(8)
        wrong = bytearray(good)
        wrong[at] ^= bit
        a.refusal("connect", describe(Peer(f"x{number}", 0), EPOCH), bytes(wrong))
    rig.finish(rig.post(a, b, some_op(context), piece(0, 4096), piece(0, 4096)))


@each_op("KVX-TRN-028", "gone", "{op} to a peer that closed before anybody had dialled it.")
def gone(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.rank("a", 64 * KIB), rig.rank("b", 64 * KIB)
    info, metadata = b.info, b.metadata()
    b.close()
    a.call("connect", info, metadata)
    op_id = a.post(b.peer, op, piece(0, 64), piece(0, 64))
    rig.until(lambda: op_id in a.ended, "an operation to a peer that is gone ends")
    context.check(isinstance(a.ended[op_id], OpFailed), f"an operation to nobody was told as {a.ended[op_id]}")
    rig.intact("after an operation to a peer that is gone")


@case(
    "KVX-TRN-025",
    "many-restarts",
    "Thirty restarts of a peer, each of which exchanges something before it is closed.",
    profile=Profile.RESILIENCE,
    limit_s=60.0,
)
def many_restarts(context: Context) -> None:
    rig, ops = Rig.of(context), declared_ops(context)
    if not ops:
        raise NotExercised("no operation is declared")
    a = rig.rank("a", 64 * KIB)
    for number in range(30):
        b = rig.rank("b", 64 * KIB, epoch=EPOCH + number)
        introduce(a, b)
        for op in ops:
            shown = Stamp(f"{number}{op.value}", EPOCH + number, 0)
            rig.finish(rig.post(a, b, op, piece(0, 4096), piece(100, 4096), stamp=shown))
        b.close()
