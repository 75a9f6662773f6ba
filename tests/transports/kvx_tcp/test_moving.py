"""Bytes arrive where they belong, in every shape and in both directions."""

from __future__ import annotations

import select
import tracemalloc

import numpy as np
import pytest

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Stamp

STAMP = Stamp("t", 7, 3)
MIB = 1 << 20


def whole(nbytes, at=0):
    return Descriptors.of([(0, at, nbytes)])


def scattered(pieces, size, seed):
    """Pieces in shuffled order, none adjacent to the one before it."""
    order = np.random.default_rng(seed).permutation(pieces).astype(np.int64)
    return Descriptors(np.zeros_like(order), order * 2 * size, np.full_like(order, size))


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("streams", [1, 3])
def test_contiguous(pair, pump, pattern, op, host, streams):
    a, b = pair(5 * MIB, listen_host=host, streams=streams, chunk_bytes=65536)
    source, destination = (a, b) if op is Op.WRITE else (b, a)
    source.memory[:] = pattern(5 * MIB, 1)
    b.transport.permit("t", a.peer, op, whole(5 * MIB), STAMP)
    a.post(1, b, op, whole(4 * MIB + 1, 100), whole(4 * MIB + 1, 200), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.ended[1] == OpDone(1, 4 * MIB + 1)
    start, other = (100, 200) if op is Op.WRITE else (200, 100)
    assert (destination.memory[other : other + 4 * MIB + 1] == source.memory[start : start + 4 * MIB + 1]).all()
    assert not destination.memory[:other].any()
    assert not destination.memory[other + 4 * MIB + 1 :].any()


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("pieces", "size"), [(4096, 1000), (5000, 3)])
def test_fragmented(pair, pump, pattern, op, pieces, size):
    a, b = pair(2 * pieces * size, chunk_bytes=MIB)
    source, destination = (a, b) if op is Op.WRITE else (b, a)
    source.memory[:] = pattern(len(source.memory), 2)
    here, there = scattered(pieces, size, 3), scattered(pieces, size, 4)
    b.transport.permit("t", None, op, there, STAMP)
    a.post(1, b, op, here, there, STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.done(1)
    rows, out = source.memory.reshape(-1, size), destination.memory.reshape(-1, size)
    from_, to = (here, there) if op is Op.WRITE else (there, here)
    assert (out[to.offset // size] == rows[from_.offset // size]).all()
    assert not out[1::2].any(), "bytes between the pieces were touched"


def test_pieces_of_one_byte_and_none(pair, pump, pattern):
    a, b = pair(4096)
    a.memory[:] = pattern(4096, 5)
    b.transport.permit("t", a.peer, Op.WRITE, whole(4096), STAMP)
    here = Descriptors.of([(0, 0, 1), (0, 9, 0), (0, 4095, 1), (0, 17, 2)])
    there = Descriptors.of([(0, 8, 1), (0, 4000, 0), (0, 3, 1), (0, 4094, 2)])
    a.post(1, b, Op.WRITE, here, there, STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.ended[1] == OpDone(1, 4)
    assert [b.memory[8], b.memory[3], *b.memory[4094:]] == [a.memory[0], a.memory[4095], *a.memory[17:19]]
    assert np.count_nonzero(b.memory) <= 4


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("pieces", [[], [(0, 5, 0)]])
def test_no_bytes_at_all(pair, pump, op, pieces):
    a, b = pair()
    b.transport.permit("t", a.peer, op, Descriptors.of([]), STAMP)
    a.post(1, b, op, Descriptors.of(pieces), Descriptors.of(pieces), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.ended[1] == OpDone(1, 0)


def test_both_directions_at_once(pair, pump, pattern):
    a, b = pair(8 * MIB)
    half = 4 * MIB
    a.memory[:half], b.memory[:half] = pattern(half, 1), pattern(half, 2)
    for rank, other in ((a, b), (b, a)):
        rank.transport.permit("t", other.peer, Op.WRITE, whole(half, half), STAMP)
    a.post(1, b, Op.WRITE, whole(half), whole(half, half), STAMP)
    b.post(1, a, Op.WRITE, whole(half), whole(half, half), STAMP)
    pump(a, b, until=lambda: a.done(1) and b.done(1))
    assert (a.memory[half:] == b.memory[:half]).all()
    assert (b.memory[half:] == a.memory[:half]).all()


def test_more_operations_than_may_be_in_flight(pair, pump, pattern):
    a, b = pair(300 * 4096)
    a.memory[:] = pattern(300 * 4096, 6)
    b.transport.permit("t", a.peer, Op.WRITE, whole(300 * 4096), STAMP)
    for at in range(300):
        a.post(at, b, Op.WRITE, whole(4096, 4096 * at), whole(4096, 4096 * (299 - at)), STAMP)
    pump(a, b, until=lambda: len(a.ended) == 300)
    assert all(a.done(at) for at in range(300))
    assert (b.memory.reshape(300, 4096) == a.memory.reshape(300, 4096)[::-1]).all()


@pytest.mark.parametrize("op", list(Op))
def test_a_small_operation_does_not_wait_for_a_large_one(pair, pump, op):
    a, b = pair(64 * MIB, streams=1, chunk_bytes=256 << 10)
    b.transport.permit("t", a.peer, op, whole(64 * MIB), STAMP)
    a.post(1, b, op, whole(60 * MIB), whole(60 * MIB), STAMP)
    a.post(2, b, op, whole(MIB, 60 * MIB), whole(MIB, 60 * MIB), STAMP)
    pump(a, b, until=lambda: len(a.ended) == 2)
    assert list(a.ended) == [2, 1]


@pytest.mark.parametrize("op", list(Op))
def test_chunks_wait_for_the_acceptance_that_is_not_on_their_own_connection(pair, pump, op):
    a, b = pair(32 * MIB, warm=True, streams=3, chunk_bytes=256 << 10)
    b.transport.permit("t", a.peer, op, whole(32 * MIB), STAMP)
    a.post(1, b, op, whole(32 * MIB), whole(32 * MIB), STAMP)
    a.poll_until_stalled()
    questions = a.transport._initiator.remotes[b.peer].link._questions
    assert sorted(map(bool, questions.values())) == [False, False, True]
    pump(a, b, until=lambda: sum(map(bool, questions.values())) == 3 or 1 in a.ended)
    assert 1 not in a.ended, "the other connections were never used"
    pump(a, b, until=lambda: 1 in a.ended)


@pytest.mark.parametrize("op", list(Op))
def test_64_mib_without_copies_in_python(pair, pump, pattern, op, evidence):
    a, b = pair(64 * MIB, warm=True)
    source, destination = (a, b) if op is Op.WRITE else (b, a)
    source.memory[:] = pattern(64 * MIB, 8)
    b.transport.permit("t", a.peer, op, whole(64 * MIB), STAMP)
    tracemalloc.start()
    try:
        a.post(1, b, op, whole(64 * MIB), whole(64 * MIB), STAMP)
        pump(a, b, until=lambda: 1 in a.ended)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert a.done(1)
    assert (source.memory == destination.memory).all()
    evidence(f"no-copies-{op.value}", {"bytes": 64 * MIB, "tracemalloc_peak_bytes": peak})
    assert peak < MIB


def test_back_pressure_stops_the_initiator_and_then_it_goes_on(pair, pump, pattern):
    a, b = pair(64 * MIB, warm=True)
    a.memory[:] = pattern(64 * MIB, 9)
    b.transport.permit("t", a.peer, Op.WRITE, whole(64 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    a.poll_until_stalled()
    assert 1 not in a.ended
    pump(a, b, until=lambda: 1 in a.ended)
    assert (a.memory == b.memory).all()


def test_idle_transports_ask_for_nothing(pair, pump):
    a, b = pair(warm=True)
    a.poll_until_stalled()
    b.poll_until_stalled()
    assert not select.select([a.transport, b.transport], [], [], 0.3)[0]
    assert a.poll() == b.poll() == []


def test_a_completion_without_traffic_makes_the_descriptor_readable(pair):
    a, _ = pair()
    assert not select.select([a.transport], [], [], 0)[0]
    a.transport.forbid("x")
    assert select.select([a.transport], [], [], 0)[0]
    assert len(a.poll()) == 1
    assert not select.select([a.transport], [], [], 0)[0]
