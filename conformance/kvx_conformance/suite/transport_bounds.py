"""Transport cases: impossible requests are answered by OpFailed, and move nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, Op, Peer
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.ops import NEEDS, each_op, piece, some_op
from kvx_conformance.suite.ranks import KIB, STAMP, Rank, Rig
from kvx_conformance.suite.subject import Feature

SIZE = 64 * KIB
Piece = tuple[int, int, int]
OUTSIDE: tuple[Piece, ...] = (
    (0, SIZE, 1),
    (0, SIZE - 1, 2),
    (0, SIZE - 7, 8),
    (0, 1, SIZE),
    (0, 0, SIZE + 1),
    (0, -1, 1),
    (0, -1, 2),
    (0, -8, 8),
    (0, -SIZE, SIZE),
    (0, 2**31, 8),
    (0, 2**32, 8),
    (0, 2**62, 8),
    (0, 2**63 - 1, 1),
    (0, 2**63 - 8, 8),
    (0, 2**62, 2**62),
    (0, 8, 2**63 - 1),
    (0, -(2**63), 8),
    (0, 64, -8),
    (0, SIZE, -SIZE),
    (0, 0, -(2**63)),
    (1, 0, 8),
    (2, 0, 8),
    (-1, 0, 8),
    (2**31, 0, 8),
    (2**40, 0, 8),
    (2**63 - 1, 0, 8),
    (-(2**63), 0, 8),
)
"""Pieces that a rank with one region, index 0 and SIZE bytes long, does not have."""


def refused(rig: Rig, a: Rank, b: Rank, op: Op, local: Descriptors, remote: Descriptors, what: str) -> None:
    """The request ends as OpFailed and no memory changes."""
    op_id = a.post(b.peer, op, local, remote)
    rig.until(lambda: op_id in a.ended, f"{what} ends")
    rig.context.check(isinstance(a.ended[op_id], OpFailed), f"{what} was told as {a.ended[op_id]}")
    rig.intact(f"after {what}")


def _ready(context: Context, op: Op) -> tuple[Rig, Rank, Rank]:
    rig = Rig.of(context)
    a, b = rig.pair(SIZE, warm=True)
    b.permit(STAMP.transfer, a.peer, op, b.ground.whole(), STAMP)
    return rig, a, b


def _afterwards(rig: Rig, a: Rank, b: Rank, op: Op) -> None:
    """It was the request that was refused, not the peer."""
    rig.finish(rig.post(a, b, op, piece(0, 4096), piece(4096, 4096), permit=False))


@each_op(
    "KVX-TRN-007", "local-outside", "{op}s with a local piece outside of memory: by one byte, negative, near 2**63."
)
def local_outside(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    for region, offset, length in OUTSIDE:
        good = (0, 0, length if 0 <= length <= SIZE else min(abs(length), 8))
        equal = (0, 0, length)
        for there in {good, equal}:
            wrong = (region, offset, length)
            refused(rig, a, b, op, Descriptors.of([wrong]), Descriptors.of([there]), f"local piece {wrong}")
    _afterwards(rig, a, b, op)


@each_op(
    "KVX-TRN-007", "remote-outside", "{op}s with a remote piece outside of memory: by one byte, negative, near 2**63."
)
def remote_outside(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    for wrong in OUTSIDE:
        local = (0, 0, wrong[2])
        refused(rig, a, b, op, Descriptors.of([local]), Descriptors.of([wrong]), f"remote piece {wrong}")
    _afterwards(rig, a, b, op)


@each_op("KVX-TRN-007", "one-of-many", "{op}s of 1000 good pieces and one beside them that ends one byte outside.")
def one_of_many(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    good = [(0, at * 64, 32) for at in range(1000)]
    bad = (0, SIZE - 31, 32)
    for place in (0, 500, 1000):
        mixed = Descriptors.of([*good[:place], bad, *good[place:]])
        fine = Descriptors.of([*good[:place], (0, SIZE - 32, 32), *good[place:]])
        refused(rig, a, b, op, mixed, fine, f"a local piece outside, number {place} of 1001")
        refused(rig, a, b, op, fine, mixed, f"a remote piece outside, number {place} of 1001")
    _afterwards(rig, a, b, op)


@each_op("KVX-TRN-007", "sums", "{op}s of pieces whose lengths only together pass 2**63.")
def sums(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    huge = Descriptors.of([(0, 0, 2**62)] * 4)
    refused(rig, a, b, op, huge, huge, "four pieces of 2**62 bytes")
    _afterwards(rig, a, b, op)


@each_op("KVX-TRN-008", "lengths", "{op}s whose pieces differ in number or in a length, even where the sums are equal.")
def lengths(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    table: Iterable[tuple[list[int], list[int]]] = (
        ([8], [9]),
        ([9], [8]),
        ([8], []),
        ([], [8]),
        ([8], [4, 4]),
        ([4, 4], [8]),
        ([3, 5], [5, 3]),
        ([8, 0], [8]),
        ([8], [0]),
        ([16] * 1000, [16] * 999 + [17]),
    )
    for here, there in table:
        sides = [Descriptors.of((0, at * 64, length) for at, length in enumerate(side)) for side in (here, there)]
        text = f"local lengths {here[:3]} ({len(here)}) against {there[:3]} ({len(there)})"
        refused(rig, a, b, op, sides[0], sides[1], text)
    _afterwards(rig, a, b, op)


@each_op("KVX-TRN-009", "unknown-peer", "{op}s to an instance, and a rank of a known one, that nobody has introduced.")
def unknown_peer(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    for nobody in (Peer("nobody", 0), Peer(b.peer.instance, 1), Peer(b.peer.instance + "x", 0), a.peer):
        op_id = a.post(nobody, op, piece(0, 64), piece(0, 64))
        rig.until(lambda op_id=op_id: op_id in a.ended, f"an operation to {nobody} ends")  # type: ignore[misc]
        context.check(isinstance(a.ended[op_id], OpFailed), f"an operation to {nobody} was told as {a.ended[op_id]}")
    rig.intact("after operations to nobody")
    _afterwards(rig, a, b, op)


@case("KVX-TRN-009", "nobody-at-all", "An operation of a rank that was never introduced to anybody.")
def nobody_at_all(context: Context) -> None:
    rig = Rig.of(context)
    a = rig.rank("a", SIZE)
    op_id = a.post(Peer("b", 0), some_op(context), piece(0, 64), piece(0, 64))
    rig.until(lambda: op_id in a.ended, "an operation to nobody ends")
    context.check(isinstance(a.ended[op_id], OpFailed), f"an operation to nobody was told as {a.ended[op_id]}")
    rig.intact("after an operation to nobody")


@each_op(
    "KVX-TRN-010",
    "too-many-pieces",
    "{op} of one piece more than `max_descriptors`: refused, or done whole.",
    profile=Profile.RESILIENCE,
    limit_s=60.0,
)
def too_many_pieces(context: Context, op: Op) -> None:
    rig, count = Rig.of(context), context.declared.max_descriptors + 1
    a, b = rig.pair(2 * count)
    row = np.arange(count, dtype=np.int64)
    zeros, ones = np.zeros_like(row), np.ones_like(row)
    move = rig.post(a, b, op, Descriptors(zeros, 2 * row, ones), Descriptors(zeros, 2 * row[::-1].copy(), ones))
    rig.until(lambda: move.end is not None, f"an operation of {count} pieces ends", limit_s=40.0)
    if isinstance(move.end, OpDone):
        rig.good(move)
    rig.intact(f"after an operation of {count} pieces")


def _undeclared(context: Context, op: Op) -> None:
    rig, a, b = _ready(context, op)
    refused(rig, a, b, op, piece(0, 4096), piece(4096, 4096), f"a {op.value.upper()}, which is not declared,")
    other = some_op(context)
    rig.finish(rig.post(a, b, other, piece(0, 4096), piece(4096, 4096)))


@case(
    "KVX-TRN-010", "undeclared-write", "A WRITE where none is declared.", lacks=[NEEDS[Op.WRITE]], needs=[Feature.READ]
)
def undeclared_write(context: Context) -> None:
    _undeclared(context, Op.WRITE)


@case("KVX-TRN-010", "undeclared-read", "A READ where none is declared.", lacks=[NEEDS[Op.READ]], needs=[Feature.WRITE])
def undeclared_read(context: Context) -> None:
    _undeclared(context, Op.READ)
