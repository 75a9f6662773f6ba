"""What was not permitted, or is not permitted any more, touches nothing."""

from __future__ import annotations

import fcntl
import sys
import termios
import time

import numpy as np
import pytest

from kvx.core.errors import LocalProtocolError, TransportError
from kvx.core.events import Fenced, Forbidden
from kvx.core.model import Descriptors, Op, Peer, Reason, Region, Stamp
from kvx.memory import Memory

STAMP = Stamp("t", 7, 3)
MIB = 1 << 20


def whole(nbytes, at=0):
    return Descriptors.of([(0, at, nbytes)])


@pytest.mark.parametrize("op", list(Op))
def test_one_byte_outside_refuses_all_of_it(pair, pump, op):
    a, b = pair(8 * MIB)
    a.memory[:] = b.memory[:] = 1
    (a if op is Op.WRITE else b).memory[:] = 2
    b.transport.permit("t", a.peer, op, whole(6 * MIB), STAMP)
    pieces = Descriptors.of([(0, 0, 5 * MIB), (0, 6 * MIB, 1)])
    a.post(1, b, op, pieces, pieces, STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.BOUNDS
    assert ((b if op is Op.WRITE else a).memory == 1).all()


@pytest.mark.parametrize(
    ("stamp", "reason"),
    [
        (Stamp("t", 8, 3), Reason.EPOCH),
        (Stamp("t", 7, 2), Reason.EPOCH),
        (Stamp("t", 7, 4), Reason.EPOCH),
        (Stamp("other", 7, 3), Reason.UNKNOWN_TRANSFER),
    ],
)
def test_a_stamp_that_is_not_the_permitted_one(pair, pump, stamp, reason):
    a, b = pair()
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(MIB), whole(MIB), stamp)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is reason
    assert not b.memory.any()


def test_a_permit_of_another_peer(pair, pump):
    a, b = pair()
    a.memory[:] = 2
    b.transport.permit("t", Peer("c", 0), Op.WRITE, whole(MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(MIB), whole(MIB), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.AUTH
    assert not b.memory.any()


def test_several_permits_of_one_transfer(make, pump):
    a, b, c = make("a"), make("b"), make("c")
    a.memory[:], c.memory[:] = 2, 3
    half = MIB // 2
    for rank, at in ((a, 0), (c, half)):
        rank.know(b)
        b.know(rank)
        b.transport.permit("t", rank.peer, Op.WRITE, whole(half, at), STAMP)
    a.post(1, b, Op.WRITE, whole(half), whole(half), STAMP)
    c.post(1, b, Op.WRITE, whole(half), whole(half, half), STAMP)
    c.post(2, b, Op.WRITE, whole(half), whole(half), STAMP)
    pump(a, b, c, until=lambda: a.done(1) and c.done(1) and 2 in c.ended)
    assert c.failed(2).reason is Reason.BOUNDS
    assert (b.memory[:half] == 2).all()
    assert (b.memory[half:] == 3).all()


def test_what_lies_in_the_sockets_when_it_is_forbidden_never_lands(pair, pump):
    a, b = pair(16 * MIB, warm=True)
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(16 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    a.poll_dry()
    b.transport.forbid("t")
    assert b.poll()[0] == Forbidden("t")
    b.memory[:] = 9
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.UNKNOWN_TRANSFER
    assert (b.memory == 9).all()


def _in_sockets(rank):
    """Bytes in the kernel's buffers of all of this rank's data connections: (to be sent, to be read)."""
    waiting = []
    for request in (termios.TIOCOUTQ, termios.FIONREAD):
        answers = [fcntl.ioctl(fd, request, bytes(4)) for fd in rank.transport._connections]
        waiting.append(sum(int.from_bytes(answer, sys.byteorder) for answer in answers))
    return waiting


def test_eight_mib_in_the_sockets_when_the_initiator_is_told_to_stop(pair, pump, evidence):
    a, b = pair(64 * MIB, warm=True, streams=8)
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(64 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    end = time.monotonic() + 40
    while _in_sockets(a)[0] + _in_sockets(b)[1] < 8 * MIB and time.monotonic() < end:
        a.poll_until_stalled()
        b.poll()  # opens the window a little further
    under_way = {"to_be_sent": _in_sockets(a)[0], "to_be_read": _in_sockets(b)[1]}
    landed = int((b.memory == 2).sum())
    assert sum(under_way.values()) >= 8 * MIB, under_way
    a.transport.cancel(1)
    b.transport.forbid("t")
    assert Forbidden("t") in b.poll()
    b.memory[:] = 9  # the blocks are reused at once
    pump(a, b, until=lambda: 1 in a.ended)
    intact = bool((b.memory == 9).all())
    evidence("stop-with-full-sockets", {"bytes_in_sockets": under_way, "landed_before": landed, "intact": intact})
    assert a.failed(1).reason is Reason.ABORTED
    assert intact


def test_forbidden_in_the_middle_of_a_frame(pair, pump):
    a, b = pair(16 * MIB, warm=True, chunk_bytes=4 * MIB)
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(16 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=b.memory.any)
    assert not b.memory.all()
    b.transport.forbid("t")
    b.memory[:] = 9
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.ABORTED
    assert (b.memory == 9).all()
    assert b.answers == [Forbidden("t")]


def test_a_read_that_is_forbidden_on_the_way_is_not_done(pair, pump):
    a, b = pair(16 * MIB, warm=True, chunk_bytes=4 * MIB)
    b.memory[:] = 2
    b.transport.permit("t", None, Op.READ, whole(16 * MIB), STAMP)
    a.post(1, b, Op.READ, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=a.memory.any)
    assert not a.memory.all()
    b.transport.forbid("t")
    b.memory[:] = 9
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.ABORTED
    assert not (a.memory == 9).any(), "memory was read after it was forbidden"


def test_forbidden_after_the_reader_has_cancelled(pair, pump):
    a, b = pair(16 * MIB, warm=True, chunk_bytes=4 * MIB)
    b.memory[:] = 2
    b.transport.permit("t", None, Op.READ, whole(16 * MIB), STAMP)
    a.post(1, b, Op.READ, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=a.memory.any)
    a.transport.cancel(1)
    a.memory[:] = 5
    a.poll_dry()
    assert a.failed(1).reason is Reason.ABORTED
    b.transport.forbid("t")
    a.post(2, b, Op.READ, whole(1), whole(1), STAMP)
    pump(a, b, until=lambda: 2 in a.ended)
    assert (a.memory == 5).all()
    assert a.failed(2).reason is Reason.UNKNOWN_TRANSFER


def test_other_transfers_go_on_when_one_is_forbidden(pair, pump):
    a, b = pair(16 * MIB, warm=True)
    a.memory[:] = 2
    half = 8 * MIB
    for at, name in ((0, "t"), (half, "u")):
        b.transport.permit(name, a.peer, Op.WRITE, whole(half, at), Stamp(name, 7, 3))
        a.post(at, b, Op.WRITE, whole(half, at), whole(half, at), Stamp(name, 7, 3))
    pump(a, b, until=lambda: b.memory[:half].any() and b.memory[half:].any())
    b.transport.forbid("t")
    b.memory[:half] = 9
    pump(a, b, until=lambda: len(a.ended) == 2)
    assert a.failed(0)
    assert a.done(half)
    assert (b.memory[:half] == 9).all()
    assert (b.memory[half:] == 2).all()


def test_a_fence_ends_what_is_under_way_and_lets_a_newer_generation_in(pair, pump):
    a, b = pair(16 * MIB, warm=True)
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(16 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=b.memory.any)
    b.transport.fence(a.peer, 4)
    b.memory[:] = 9
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.TRANSPORT
    assert b.answers == [Fenced(a.peer, 4)]
    a.post(2, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=lambda: 2 in a.ended)
    assert a.failed(2).reason is Reason.EPOCH
    assert (b.memory == 9).all()
    newer = Stamp("t", 7, 4)
    b.transport.permit("t", a.peer, Op.WRITE, whole(16 * MIB), newer)
    a.post(3, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), newer)
    pump(a, b, until=lambda: 3 in a.ended)
    assert a.done(3)
    assert (b.memory == 2).all()


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ([(0, 0, 8)], [(0, 0, 9)]),
        ([(0, 0, 8)], [(0, 0, 4), (0, 4, 4)]),
        ([(0, MIB - 7, 8)], [(0, 0, 8)]),
        ([(0, -1, 8)], [(0, 0, 8)]),
        ([(1, 0, 8)], [(0, 0, 8)]),
        ([(0, 0, -8)], [(0, 0, -8)]),
        ([(0, 0, 8)], [(0, -8, 8)]),
        ([(0, 0, 8)], [(-1, 0, 8)]),
        ([(0, 0, 8)], [(0, 2**62, 8)]),
        ([(0, 2**62, 2**62)], [(0, 2**62, 2**62)]),
        ([(0, 0, 8)], [(0, MIB - 7, 8)]),
    ],
)
def test_impossible_pieces_fail_the_operation(pair, pump, local, remote):
    a, b = pair()
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(MIB), STAMP)
    a.post(1, b, Op.WRITE, Descriptors.of(local), Descriptors.of(remote), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.BOUNDS
    assert not b.memory.any()


def test_an_unknown_peer_fails_the_operation(make):
    a = make("a")
    a.transport.post(1, Peer("nobody", 0), Op.READ, whole(1), whole(1), STAMP)
    a.poll_dry()
    assert a.failed(1).reason is Reason.TRANSPORT


def test_mistakes_of_the_caller_raise(pair, make):
    a, b = pair()
    a.post(1, b, Op.READ, whole(1), whole(1), STAMP)
    with pytest.raises(LocalProtocolError, match="in flight"):
        a.post(1, b, Op.READ, whole(1), whole(1), STAMP)
    with pytest.raises(TransportError, match="registered once"):
        a.transport.register([])
    with pytest.raises(TransportError, match="not registered"):
        b.transport.permit("t", None, Op.READ, whole(MIB + 1), STAMP)
    with pytest.raises(TransportError, match="metadata"):
        a.transport.connect(b.info, b"\xc1nonsense")


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ([Region(0, 1, 1, "cuda:0")], "cuda:0"),
        ([Region(0, 1, 1), Region(0, 9, 1)], "twice"),
        ([Region(0, 0, 1)], "address"),
    ],
)
def test_memory_that_cannot_be_registered(regions, text):
    with pytest.raises(TransportError, match=text):
        Memory(regions)


def test_views_of_memory_are_checked():
    buffer = np.zeros(16, dtype=np.uint8)
    memory = Memory([Region(5, buffer.ctypes.data, 16)])
    memory.view(5, 4, 2)[:] = b"ab"
    assert bytes(buffer[3:7]) == b"\0ab\0"
    for piece in ((5, 15, 2), (5, -1, 1), (5, 0, -1), (4, 0, 1), (6, 0, 0)):
        with pytest.raises(TransportError):
            memory.view(*piece)
