"""How operations end: cancelled, broken, or in doubt until the target has spoken (R14)."""

from __future__ import annotations

import contextlib
import select
import socket
import time

import msgspec
import pytest

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Reason, Stamp

STAMP = Stamp("t", 7, 3)
MIB = 1 << 20


def whole(nbytes, at=0):
    return Descriptors.of([(0, at, nbytes)])


class Relay:
    """A byte relay in front of a rank. It can cut the initiator's side and keep what it has taken from it."""

    def __init__(self, target):
        self._to = msgspec.msgpack.decode(target.transport.metadata())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.metadata = msgspec.msgpack.encode({**self._to, "port": self._listener.getsockname()[1]})
        self.pairs = []
        self.hold = False

    def turn(self):
        if select.select([self._listener], [], [], 0)[0]:
            near = self._listener.accept()[0]
            far = socket.create_connection((self._to["host"], self._to["port"]))
            near.setblocking(False)
            far.setblocking(False)
            self.pairs.append([near, far, bytearray(), bytearray()])
        for near, far, up, down in self.pairs:
            self._carry(near, far, up, self.hold)
            self._carry(far, near, down, False)

    def _carry(self, source, destination, held, hold):
        if source is not None:
            try:
                if len(held) < 4 * MIB:
                    held += source.recv(65536)
            except BlockingIOError:
                pass
        if destination is not None and held and not hold:
            with contextlib.suppress(BlockingIOError):
                del held[: destination.send(held)]

    def cut(self):
        for pair in self.pairs:
            pair[0].close()
            pair[0] = None

    def deliver(self):
        """Push what is held of the cut pairs to the target, as far as its sockets take it."""
        for near, far, up, _ in self.pairs:
            if near is None:
                try:
                    del up[: far.send(up)]
                except OSError:
                    up.clear()

    def close(self):
        self._listener.close()
        for near, far, _, _ in self.pairs:
            for sock in (near, far):
                if sock is not None:
                    sock.close()


@pytest.fixture
def relayed(make, pump):
    a, b = make("a", 8 * MIB), make("b", 8 * MIB)
    relay = Relay(b)
    a.know(b, relay.metadata)
    b.know(a)
    a.memory[:] = 2
    yield a, b, relay
    relay.close()


def test_a_broken_write_is_in_doubt_until_the_target_has_ended_it(relayed):
    a, b, relay = relayed
    b.transport.permit("t", a.peer, Op.WRITE, whole(8 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(8 * MIB), whole(8 * MIB), STAMP)
    deadline = time.monotonic() + 30
    while not b.memory.any():
        assert time.monotonic() < deadline
        a.poll(), b.poll(), relay.turn()
    relay.hold = True
    held = 0
    while held < MIB:
        assert time.monotonic() < deadline
        a.poll(), relay.turn()
        held = sum(len(pair[2]) for pair in relay.pairs)
    relay.cut()
    for _ in range(50):
        a.poll()
    assert 1 not in a.ended, "the target could still receive what the relay holds"
    relay.deliver()
    relay.hold = False
    while 1 not in a.ended:
        assert time.monotonic() < deadline
        a.poll(), b.poll(), relay.turn()
    assert a.failed(1).reason is Reason.TRANSPORT
    b.memory[:] = 9
    for _ in range(50):
        relay.deliver(), a.poll(), b.poll(), relay.turn()
    assert (b.memory == 9).all()
    a.post(2, b, Op.WRITE, whole(8 * MIB), whole(8 * MIB), STAMP)
    while 2 not in a.ended:
        assert time.monotonic() < deadline
        a.poll(), b.poll(), relay.turn()
    assert a.done(2), "one broken connection must not shut a peer out"
    assert (b.memory == 2).all()


def test_a_broken_read_is_over_at_once(relayed):
    a, b, relay = relayed
    b.transport.permit("t", a.peer, Op.READ, whole(8 * MIB), STAMP)
    a.post(1, b, Op.READ, whole(8 * MIB), whole(8 * MIB), STAMP)
    b.memory[:] = 3
    deadline = time.monotonic() + 30
    while not (a.memory == 3).any():
        assert time.monotonic() < deadline
        a.poll(), b.poll(), relay.turn()
    relay.cut()
    while 1 not in a.ended:
        assert time.monotonic() < deadline
        a.poll()
    assert a.failed(1).reason is Reason.TRANSPORT
    a.memory[:] = 5
    for _ in range(50):
        a.poll(), b.poll(), relay.turn()
    assert (a.memory == 5).all()


def test_a_cancelled_write_ends_when_what_left_has_been_answered(pair, pump):
    a, b = pair(32 * MIB, warm=True)
    a.memory[:] = 2
    b.transport.permit("t", a.peer, Op.WRITE, whole(32 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(32 * MIB), whole(32 * MIB), STAMP)
    a.poll_dry()
    a.transport.cancel(1)
    a.transport.cancel(1)
    a.poll_dry()
    assert 1 not in a.ended
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.ABORTED
    assert not b.memory.all(), "nothing was left to cancel: the test shows nothing"
    b.memory[:] = 9
    a.post(2, b, Op.WRITE, whole(1), whole(1), STAMP)
    pump(a, b, until=lambda: a.done(2))
    assert (b.memory[1:] == 9).all()


def test_a_cancelled_read_ends_at_once_and_the_rest_goes_nowhere(pair, pump):
    a, b = pair(32 * MIB, warm=True)
    b.memory[:] = 2
    b.transport.permit("t", a.peer, Op.READ, whole(32 * MIB), STAMP)
    a.post(1, b, Op.READ, whole(32 * MIB), whole(32 * MIB), STAMP)
    pump(a, b, until=a.memory.any)
    a.transport.cancel(1)
    a.told += a.transport.poll()
    assert a.failed(1).reason is Reason.ABORTED
    a.memory[:] = 9
    a.post(2, b, Op.READ, whole(1), whole(1), STAMP)
    pump(a, b, until=lambda: a.done(2))
    assert (a.memory[1:] == 9).all()


def test_cancelled_before_it_was_sent(pair, pump):
    a, b = pair()
    a.post(1, b, Op.WRITE, whole(8), whole(8), STAMP)
    a.transport.cancel(1)
    a.transport.cancel(77)
    a.poll_dry()
    assert a.failed(1).reason is Reason.ABORTED


def test_cancelling_one_of_many_in_a_queue(pair, pump):
    a, b = pair(200 * 4096)
    b.transport.permit("t", a.peer, Op.WRITE, whole(200 * 4096), STAMP)
    for at in range(200):
        a.post(at, b, Op.WRITE, whole(4096, 4096 * at), whole(4096, 4096 * at), STAMP)
    a.transport.cancel(150)
    a.transport.cancel(3)
    pump(a, b, until=lambda: len(a.ended) == 200)
    assert [at for at in a.ended if not a.done(at)] in ([3, 150], [150, 3])


@pytest.mark.parametrize("op", list(Op))
def test_the_peer_closes_in_the_middle(pair, pump, op):
    a, b = pair(32 * MIB, warm=True)
    (a if op is Op.WRITE else b).memory[:] = 2
    b.transport.permit("t", a.peer, op, whole(32 * MIB), STAMP)
    a.post(1, b, op, whole(32 * MIB), whole(32 * MIB), STAMP)
    pump(a, b, until=(b if op is Op.WRITE else a).memory.any)
    b.transport.close()
    pump(a, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.TRANSPORT
    a.post(2, b, op, whole(1), whole(1), STAMP)
    pump(a, until=lambda: 2 in a.ended)
    assert "refused" in a.failed(2).detail


def test_a_restarted_peer_replaces_the_old_one(make, pump):
    a, old = make("a", 8 * MIB), make("b", 8 * MIB)
    a.know(old)
    old.know(a)
    a.memory[:] = 2
    old.transport.permit("t", None, Op.WRITE, whole(8 * MIB), STAMP)
    a.post(1, old, Op.WRITE, whole(8 * MIB), whole(8 * MIB), STAMP)
    pump(a, old, until=old.memory.any)
    new = make("b", 8 * MIB, epoch=2)
    a.know(new)
    a.poll_dry()
    assert a.failed(1).reason is Reason.TRANSPORT
    new.transport.permit("t", None, Op.WRITE, whole(8 * MIB), STAMP)
    a.post(2, new, Op.WRITE, whole(8 * MIB), whole(8 * MIB), STAMP)
    pump(a, new, until=lambda: 2 in a.ended)
    assert a.done(2)
    assert (new.memory == 2).all()


def test_a_restarted_initiator_ends_what_the_old_one_had_open(make, pump):
    old, b = make("a", 16 * MIB), make("b", 16 * MIB)
    old.know(b)
    b.know(old)
    old.memory[:] = 2
    b.transport.permit("t", old.peer, Op.WRITE, whole(16 * MIB), STAMP)
    old.post(1, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(old, b, until=b.memory.any)
    new = make("a", 16 * MIB, epoch=2)
    b.know(new)
    b.memory[:] = 9
    for _ in range(50):
        old.poll(), b.poll()
    assert (b.memory == 9).all()
    assert not old.done(1) if 1 in old.ended else True
    old.post(2, b, Op.WRITE, whole(1), whole(1), STAMP)
    pump(old, b, until=lambda: 2 in old.ended)
    assert old.failed(2).reason is Reason.TRANSPORT


def test_learning_of_a_peer_again_changes_nothing(pair, pump):
    a, b = pair(8 * MIB, warm=True)
    b.transport.permit("t", a.peer, Op.WRITE, whole(8 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(8 * MIB), whole(8 * MIB), STAMP)
    pump(a, b, until=lambda: a.poll() is not None)
    a.know(b)
    b.know(a)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.ended[1] == OpDone(1, 8 * MIB)


def test_closing_twice_and_polling_afterwards(pair):
    a, b = pair(warm=True)
    a.post(1, b, Op.WRITE, whole(8), whole(8), STAMP)
    a.transport.close()
    a.transport.close()
    assert a.transport.poll() == []


def test_another_epoch_of_the_same_transport_is_asked_what_became_of_a_write(pair, pump):
    a, b = pair(16 * MIB, warm=True)
    a.memory[:] = 2
    b.transport.permit("t", None, Op.WRITE, whole(16 * MIB), STAMP)
    a.post(1, b, Op.WRITE, whole(16 * MIB), whole(16 * MIB), STAMP)
    pump(a, b, until=b.memory.any)
    b.epoch = 2
    a.know(b)
    a.poll_dry()
    assert 1 not in a.ended, "nobody has said yet that nothing can land"
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.TRANSPORT
    b.memory[:] = 9
    a.poll_dry()
    b.poll_dry()
    assert (b.memory == 9).all()
