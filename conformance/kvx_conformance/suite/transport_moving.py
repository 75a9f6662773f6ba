"""Transport cases: each byte comes to its place, in every shape, and the end is told then and once."""

from __future__ import annotations

from random import Random

import numpy as np

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Peer, Stamp
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.ground import MIB, Ground
from kvx_conformance.suite.ops import each_op, piece, some_op
from kvx_conformance.suite.ranks import EPOCH, KIB, STAMP, Rig, introduce
from kvx_conformance.suite.subject import Feature

MANY = 131_072
"""Pieces in one operation: a long and badly fragmented request has so many."""


def scattered(rng: Random, count: int, slot: int, length: int | None = None) -> tuple[Descriptors, Descriptors]:
    """Pieces in slots of `slot` bytes, shuffled on both sides, of one length or of lengths below a slot's."""
    chance = np.random.default_rng(rng.randrange(1 << 32))
    sizes = chance.integers(1, slot, count) if length is None else np.full(count, length)
    zeros = np.zeros(count, dtype=np.int64)

    def side() -> Descriptors:
        return Descriptors(zeros, chance.permutation(count).astype(np.int64) * slot, sizes.astype(np.int64))

    return side(), side()


@each_op("KVX-TRN-002", "regions", "{op} between three regions of odd sizes, indexes and addresses.")
def regions(context: Context, op: Op) -> None:
    rig, sizes, indexes = Rig.of(context), (5000, 70_001, 4096), (7, 0, 300)
    a = rig.rank("a", ground=Ground(sizes, indexes=indexes, shift=3))
    b = rig.rank("b", ground=Ground(sizes, indexes=indexes, shift=1))
    introduce(a, b)
    local = Descriptors.of([(7, 0, 5000), (0, 1, 4000), (0, 60_000, 10_001), (300, 4095, 1)])
    remote = Descriptors.of([(0, 0, 5000), (300, 96, 4000), (0, 6000, 10_001), (7, 4999, 1)])
    rig.finish(rig.post(a, b, op, local, remote))


@each_op("KVX-TRN-004", "one-piece", "{op} of one piece of almost 1 MiB from and to odd places.")
def one_piece(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(MIB)
    rig.finish(rig.post(a, b, op, piece(101, MIB - 333), piece(7, MIB - 333)))


@each_op("KVX-TRN-004", "whole-region", "{op} of a whole region of 16 MiB to its last byte.")
def whole_region(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(16 * MIB)
    rig.finish(rig.post(a, b, op, a.ground.whole(), b.ground.whole()))


@each_op("KVX-TRN-004", "sizes", "{op} of one piece, in sizes around each power of two up to 1 MiB.")
def sizes(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(MIB + 64)
    for power in range(21):
        for size in sorted({max(1, (1 << power) - 1), 1 << power, (1 << power) + 1}):
            rig.finish(rig.post(a, b, op, piece(17, size), piece(33, size)))


@each_op("KVX-TRN-004", "alignments", "{op} of pieces that begin at each of 16 by 16 alignments, some across pages.")
def alignments(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(256 * 4096)
    pairs = [(i, j) for i in range(16) for j in range(16)]
    lengths = [(i * 16 + j) % 67 + 1 for i, j in pairs]
    local = Descriptors.of((0, at * 4096 + 4072 * (at % 2) + i, lengths[at]) for at, (i, _) in enumerate(pairs[:-1]))
    there = [(0, at * 4096 + 4072 * (at % 3 == 0) + j, lengths[at]) for at, (_, j) in enumerate(pairs[:-1])]
    remote = Descriptors.of(there)
    rig.finish(rig.post(a, b, op, local, remote))


@each_op("KVX-TRN-004", "scattered", "{op} of 4096 pieces of random lengths, in another order on each side.")
def scatter(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(4096 * 601)
    rig.finish(rig.post(a, b, op, *scattered(context.rng, min(4096, context.declared.max_descriptors), 601)))


@each_op("KVX-TRN-004", "neighbours", "{op} of 1024 neighbouring pieces that arrive reversed, and as they were.")
def neighbours(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(2 * 1024 * 96)
    row = np.arange(min(1024, context.declared.max_descriptors), dtype=np.int64) * 96
    zeros, length = np.zeros_like(row), np.full_like(row, 96)
    there = Descriptors(zeros, row, length)
    rig.finish(rig.post(a, b, op, there, Descriptors(zeros, row[::-1].copy(), length)))
    rig.finish(rig.post(a, b, op, there, Descriptors(zeros, row + 1024 * 96, length)))


@each_op("KVX-TRN-004", "many-pieces", "{op} of 131,072 pieces of 8 bytes in one operation, shuffled on both sides.")
def many_pieces(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(MANY * 16)
    rig.finish(rig.post(a, b, op, *scattered(context.rng, min(MANY, context.declared.max_descriptors), 16, 8)))


@each_op(
    "KVX-TRN-004",
    "many-pieces-again",
    "{op} of 131,072 pieces of 1, 3, 64 and of random lengths, three times each.",
    profile=Profile.SOAK,
    limit_s=240.0,
)
def many_pieces_again(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(MANY * 129)
    for length in (1, 3, 64, None) * 3:
        count = min(MANY, context.declared.max_descriptors)
        rig.finish(rig.post(a, b, op, *scattered(context.rng, count, 129, length)))


@each_op(
    "KVX-TRN-004",
    "random-shapes",
    "200 {op}s of random shapes over two regions, up to 2000 pieces each.",
    profile=Profile.RESILIENCE,
    limit_s=60.0,
)
def random_shapes(context: Context, op: Op) -> None:
    rig, rng = Rig.of(context), context.rng
    a, b = rig.pair(2000 * 257)
    for _ in range(200):
        slot = rng.choice((2, 9, 65, 257))
        count = rng.randint(1, min(2000, context.declared.max_descriptors))
        rig.finish(rig.post(a, b, op, *scattered(rng, count, slot)))


@each_op("KVX-TRN-005", "no-pieces", "{op} of no piece at all.")
def no_pieces(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair()
    rig.finish(rig.post(a, b, op, Descriptors.of([]), Descriptors.of([])))


@each_op("KVX-TRN-005", "empty-pieces", "{op} of pieces of no bytes, alone and between others.")
def empty_pieces(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(4096)
    rig.finish(rig.post(a, b, op, piece(5, 0), piece(9, 0)))
    local = Descriptors.of([(0, 0, 0), (0, 0, 1), (0, 9, 0), (0, 4095, 1), (0, 17, 2), (0, 90, 0)])
    remote = Descriptors.of([(0, 1, 0), (0, 8, 1), (0, 4000, 0), (0, 3, 1), (0, 4094, 2), (0, 8, 0)])
    rig.finish(rig.post(a, b, op, local, remote))


@each_op("KVX-TRN-006", "source", "{op} whose source pieces overlap.")
def source_overlaps(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * 4096)
    overlapping = Descriptors.of((0, at * 100, 4096) for at in range(32))
    apart = Descriptors.of((0, at * 8000, 4096) for at in range(32))
    sides = (overlapping, apart) if op is Op.WRITE else (apart, overlapping)
    rig.finish(rig.post(a, b, op, *sides))


@each_op("KVX-TRN-006", "destination", "{op} whose destination pieces overlap.")
def destination_overlaps(context: Context, op: Op) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(32 * KIB)
    apart = Descriptors.of([(0, 0, 8192), (0, 9000, 8192)])
    overlapping = Descriptors.of([(0, 100, 8192), (0, 4000, 8192)])
    sides = (apart, overlapping) if op is Op.WRITE else (overlapping, apart)
    move = rig.post(a, b, op, *sides)
    rig.ended(move)
    if move.done:
        backwards = np.concatenate((move.payload[8192:], move.payload[:8192]))
        other = move.ground.with_bytes(Descriptors.of(overlapping.pieces()[::-1]), backwards)
        move.ground.due = move.landed()
        flaw = move.ground.flaw(other)
        context.check(not flaw, f"{flaw}: none of the bytes that were sent there")
        move.ground.due[:] = move.ground.memory
    rig.intact("after pieces that overlap at the destination")


@case("KVX-TRN-011", "each-once", "Sixty operations, good and impossible ones: each ends once, and counts its bytes.")
def each_once(context: Context) -> None:
    rig, op = Rig.of(context), some_op(context)
    a, b = rig.pair(64 * KIB)
    nobody, nowhere = Peer("nobody", 0), piece(64 * KIB, 1)
    good = []
    for at in range(20):
        here, there = piece(at * 1000, 10 * at + 1), piece(at * 1100, 10 * at + 1)
        good.append(rig.post(a, b, op, here, there))
        a.post(nobody, op, here, there)
        a.post(b.peer, op, nowhere, nowhere)
    rig.until(lambda: a.in_flight == 0, "each of 60 operations ends")
    rig.linger(wait_s=0.1)
    for move in good:
        rig.good(move)
        due = OpDone(move.op_id, len(move.payload))
        context.check(move.end == due, f"the end of {len(move.payload)} bytes was told as {move.end}")
    failed = sum(not isinstance(end, OpDone) for end in a.ended.values())
    context.check(failed == 40, f"of 40 impossible operations {failed} failed")
    rig.intact("after sixty operations")


@each_op(
    "KVX-TRN-012",
    "at-that-moment",
    "40 {op}s of random sizes, every other one in pieces: all bytes are there when OpDone is told.",
)
def at_that_moment(context: Context, op: Op) -> None:
    rig, rng = Rig.of(context), context.rng
    a, b = rig.pair(256 * KIB)
    for _ in range(20):
        rig.finish(rig.post(a, b, op, *scattered(rng, rng.randint(2, 60), 4096)))
        size = rng.randint(1, 200 * KIB)
        rig.finish(rig.post(a, b, op, piece(rng.randrange(50 * KIB), size), piece(rng.randrange(50 * KIB), size)))


@case(
    "KVX-TRN-012",
    "used-at-once",
    "What a WRITE has brought is read back by the READ that is posted when it is told: one hundred times.",
    needs=[Feature.WRITE, Feature.READ],
)
def used_at_once(context: Context) -> None:
    rig = Rig.of(context)
    a, b = rig.pair(64 * KIB)
    stamp = Stamp("back", EPOCH, 3)
    for at in range(100):
        a.ground.fill(1000 + at)
        rig.finish(rig.post(a, b, Op.WRITE, piece(0, 8000), piece(100, 8000), stamp=STAMP))
        rig.finish(rig.post(a, b, Op.READ, piece(30_000, 8000), piece(100, 8000), stamp=stamp))
