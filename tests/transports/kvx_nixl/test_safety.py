"""Peers that lie, calls into NIXL that hang, ranks that start anew: what becomes of everybody else."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from kvx import plugins
from kvx.core.errors import LocalProtocolError, TransportError
from kvx.core.model import Descriptors, Op, Peer, Reason, Stamp
from kvx_nixl.agent import Agent, NixlError
from kvx_nixl.words import (
    VERSION,
    Challenge,
    Contact,
    Hello,
    Introduce,
    Landed,
    Proof,
    Reader,
    Refuse,
    Ring,
    Status,
    Word,
    agents_of,
    encode,
    prove,
)

pytestmark = pytest.mark.timeout(120)
PIECE = Descriptors.of([(0, 0, 4096)])


class Liar:
    """A scripted dialler of the bell."""

    def __init__(self, rank: Any, secret: bytes = b"", incarnation: bytes = b"l" * 16) -> None:
        self.contact = Contact.decode(rank.transport.metadata(), rank.transport.backend.name)
        self.secret, self.rank = secret, rank
        self.hello = Hello(VERSION, "liar#0", incarnation, str(rank.peer), self.contact.incarnation, b"n" * 16)
        self.sock = socket.create_connection((self.contact.host, self.contact.port), 10)
        self.sock.setblocking(False)
        self._reader = Reader()
        self._reader.limit = 1 << 24
        self.heard: list[Word] = []
        self.closed = False

    def say(self, word: Word) -> None:
        self.sock.sendall(encode(word))

    def listen(self, until: Callable[[], bool], *others: Any) -> None:
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, self.heard
            select.select([self.sock, self.rank.transport], [], [], 0.05)
            for rank in (self.rank, *others):
                rank.poll()
            with contextlib.suppress(BlockingIOError):
                try:
                    data = self.sock.recv(1 << 20)
                except ConnectionResetError:
                    data = b""
                self.closed |= not data
                self.heard += self._reader.feed(data)

    def greet(self) -> None:
        self.say(self.hello)
        self.listen(lambda: any(isinstance(word, Challenge) for word in self.heard))
        (challenge,) = [word.nonce for word in self.heard if isinstance(word, Challenge)]
        self.say(Proof(prove(self.secret, b"dialler", self.hello, challenge)))
        self.listen(lambda: len(self.heard) > 1 or self.closed)


@pytest.fixture
def lie_to() -> Iterator[Callable[..., Liar]]:
    liars: list[Liar] = []

    def lie_to(*arguments: Any, **more: Any) -> Liar:
        liars.append(Liar(*arguments, **more))
        return liars[-1]

    yield lie_to
    for liar in liars:
        liar.sock.close()


def works(pump: Any, initiator: Any, target: Any, op_id: int) -> None:
    """One verified WRITE."""
    initiator.memory[:4096] = op_id
    initiator.post(op_id, target, Op.WRITE, PIECE, PIECE)
    pump(initiator, target, until=lambda: initiator.done(op_id))
    assert (target.memory[:4096] == op_id).all()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\0\0\0\1\xc0", encode(Ring(True, 0))])
def test_strangers_are_cut_off(pair: Any, pump: Any, data: bytes, lie_to: Any) -> None:
    initiator, target = pair()
    liar = lie_to(target)
    liar.sock.sendall(data)
    liar.listen(lambda: liar.closed)
    works(pump, initiator, target, 1)


def test_who_does_not_know_the_secret_is_refused(pair: Any, pump: Any, lie_to: Any) -> None:
    initiator, target = pair(secret=b"s" * 32)
    liar = lie_to(target, secret=b"x" * 32)
    liar.greet()
    assert [word for word in liar.heard if isinstance(word, Refuse)] == [Refuse(Status.AUTH, b"")]
    works(pump, initiator, target, 1)


def test_who_means_another_start_is_told_so_with_proof(pair: Any, lie_to: Any) -> None:
    _, target = pair(secret=b"s" * 32)
    liar = lie_to(target, secret=b"s" * 32)
    liar.hello = msgspec.structs.replace(liar.hello, target_incarnation=b"o" * 16)
    liar.greet()
    challenge, refusal = liar.heard
    assert isinstance(challenge, Challenge) and isinstance(refusal, Refuse)
    assert refusal.mac == prove(b"s" * 32, b"refuse %d" % Status.STALE, liar.hello, challenge.nonce)


@pytest.mark.parametrize("lie", ["truncated", "foreign", "garbage", "digest"])
def test_damaged_metadata_never_reaches_nixl(pair: Any, pump: Any, monkeypatch: Any, lie: str, lie_to: Any) -> None:
    """Truncated metadata has wiped agents that NIXL knew: the peers of before still work."""
    initiator, target = pair()
    works(pump, initiator, target, 1)
    seen: list[str] = []
    monkeypatch.setattr(Agent, "learn", lambda self, name, metadata: seen.append(name))
    liar = lie_to(target)
    liar.greet()
    mine = agents_of("liar#0", liar.hello.incarnation) + "1"
    real = initiator.transport.introduction()
    words = {
        "truncated": msgspec.structs.replace(real, agent=mine, metadata=real.metadata[:-20]),
        "foreign": real,
        "garbage": Introduce.of(mine, b"\0" * 500, []),
        "digest": msgspec.structs.replace(real, digest=b"\0" * 16),
    }
    liar.say(words[lie])
    if lie == "garbage":
        liar.listen(lambda: any(type(word).__name__ == "Ready" for word in liar.heard))
        assert "metadata" in liar.heard[-1].error
    else:
        liar.listen(lambda: liar.closed)
    assert not seen
    works(pump, initiator, target, 2)


def test_a_peer_cannot_say_that_anothers_write_has_landed(pair: Any, make: Any, pump: Any, lie_to: Any) -> None:
    initiator, target = pair()
    works(pump, initiator, target, 1)
    initiator.memory[:4096] = 9
    initiator.post(2, target, Op.WRITE, PIECE, PIECE)
    liar = lie_to(initiator)
    liar.greet()
    liar.say(Landed(2, [0]))
    liar.listen(lambda: liar.closed)
    assert 2 not in initiator.ended
    pump(initiator, target, until=lambda: initiator.done(2))


def test_one_id_is_in_flight_once(pair: Any, pump: Any) -> None:
    initiator, target = pair()
    initiator.post(1, target, Op.WRITE, PIECE, PIECE)
    with pytest.raises(LocalProtocolError):
        initiator.post(1, target, Op.WRITE, PIECE, PIECE)
    pump(initiator, target, until=lambda: initiator.done(1))


def test_an_unknown_peer_and_one_that_nobody_listens_for(pair: Any, pump: Any) -> None:
    initiator, target = pair()
    initiator.transport.post(1, Peer("nobody", 0), Op.READ, PIECE, PIECE, Stamp("t", 1, 1))
    pump(initiator, until=lambda: 1 in initiator.ended)
    assert initiator.failed(1).reason is Reason.TRANSPORT
    target.transport.close()
    initiator.post(2, target, Op.READ, PIECE, PIECE)
    pump(initiator, until=lambda: 2 in initiator.ended)
    assert "refused" in initiator.failed(2).detail


def test_a_start_of_a_peer_has_agents_of_its_own(make: Any, pump: Any) -> None:
    initiator, old = make("a"), make("b")
    initiator.know(old)
    works(pump, initiator, old, 1)
    names = {old.transport.worker.name}
    old.transport.close()
    new = make("b", epoch=2)
    initiator.know(new)
    works(pump, initiator, new, 2)
    names.add(new.transport.worker.name)
    assert len(names) == 2


@pytest.mark.parametrize("stays", ["initiator", "target"])
def test_the_agent_of_a_peer_that_has_left_is_forgotten_while_nothing_moves(
    make: Any, pump: Any, monkeypatch: Any, stays: str
) -> None:
    monkeypatch.setattr("kvx_nixl.crew._UNUSED_S", 0.5)
    initiator, target = make("a", handshake_s=1.0), make("b", handshake_s=1.0)
    initiator.know(target)
    works(pump, initiator, target, 1)
    left, here = (target, initiator) if stays == "initiator" else (initiator, target)
    assert here.transport._crew._known
    left.transport.close()
    pump(here, until=lambda: not here.transport._crew._known)
    assert not here.transport._busy()


def test_an_agent_that_has_met_all_it_can_is_replaced_in_time(make: Any, pump: Any, monkeypatch: Any) -> None:
    """LIBFABRIC gives each agent a number of 8 bits, and none to the 256th."""
    initiator = make("a")
    limited = attrs.evolve(initiator.transport.backend, max_peers=3)
    monkeypatch.setattr(initiator.transport._crew, "_backend", limited)
    names = set()
    for number in range(1, 8):
        target = make("b", epoch=number)
        initiator.know(target)
        works(pump, initiator, target, number)
        names.add(initiator.transport.worker.name if initiator.transport.worker else "")
        target.transport.close()
    assert len(names - {""}) >= 3


def test_a_call_that_hangs_costs_an_agent_and_not_the_other_peers(make: Any, pump: Any, monkeypatch: Any) -> None:
    """NIXL may block for 60 s while it adds a peer: its thread is left behind, the rest goes on with a new one."""
    initiator, target, stuck = make("a", call_s=0.4), make("b"), make("c")
    initiator.know(target)
    initiator.know(stuck)
    works(pump, initiator, target, 1)
    before = initiator.transport.worker.name
    added, release = Agent.add, threading.Event()

    def add(self: Agent, name: str, metadata: bytes) -> None:
        if self.name == before and name.startswith("c#0/"):
            self.calling = ("adding", time.monotonic())
            release.wait(60)
        added(self, name, metadata)

    monkeypatch.setattr(Agent, "add", add)
    initiator.post(2, stuck, Op.WRITE, PIECE, PIECE)
    pump(initiator, target, stuck, until=lambda: initiator.done(2))
    assert initiator.transport.worker.name != before
    for op_id in (3, 4):
        works(pump, initiator, target, op_id)
    release.set()
    pump(initiator, until=lambda: not initiator.transport._crew.busy)


def test_operations_that_the_abandoned_worker_had_end_when_its_call_returns(
    pair: Any, pump: Any, monkeypatch: Any
) -> None:
    initiator, target = pair(call_s=0.4)
    works(pump, initiator, target, 1)
    before, started, release = initiator.transport.worker.name, Agent.start, threading.Event()

    def start(self: Agent, post: Any) -> bool:
        done = started(self, post)
        if self.name == before:
            self.calling = ("posting", time.monotonic())
            release.wait(60)
            self.calling = None
        return done

    monkeypatch.setattr(Agent, "start", start)
    whole = Descriptors.of([(0, 0, 1 << 20)])
    initiator.memory[:] = 4
    initiator.post(2, target, Op.WRITE, whole, whole)
    pump(initiator, target, until=lambda: getattr(initiator.transport.worker, "name", before) != before)
    works(pump, initiator, target, 3)
    assert 2 not in initiator.ended, "nothing shows that it has ended"
    release.set()
    pump(initiator, target, until=lambda: initiator.done(2))
    assert (target.memory[4096:] == 4).all()


def test_an_operation_that_nixl_fails_stays_in_flight_until_it_is_proven_quiet(
    pair: Any, pump: Any, monkeypatch: Any
) -> None:
    """R14. A WRITE of which all has landed is done, whatever NIXL says; a READ fails once its agent is destroyed."""
    initiator, target = pair()
    works(pump, initiator, target, 1)
    before = initiator.transport.worker.name
    started = Agent.start

    def start(self: Agent, post: Any) -> bool:
        started(self, post)
        raise NixlError("posting: made up")

    monkeypatch.setattr(Agent, "start", start)
    initiator.memory[:4096] = 6
    initiator.post(2, target, Op.WRITE, PIECE, PIECE)
    initiator.post(3, target, Op.READ, Descriptors.of([(0, 8192, 64)]), Descriptors.of([(0, 0, 64)]))
    pump(initiator, target, until=lambda: initiator.done(2))
    assert (target.memory[:4096] == 6).all()
    pump(initiator, target, until=lambda: 3 in initiator.ended)
    assert "made up" in initiator.failed(3).detail
    monkeypatch.undo()
    pump(initiator, target, until=lambda: getattr(initiator.transport.worker, "name", before) != before)
    works(pump, initiator, target, 4)


@pytest.mark.parametrize("times", [1, 2])
def test_what_nixl_refuses_before_it_begins_is_tried_once_more(
    pair: Any, pump: Any, monkeypatch: Any, times: int
) -> None:
    """Measured of LIBFABRIC: after the death of one peer its agent may refuse to post to another one."""
    initiator, target = pair()
    works(pump, initiator, target, 1)
    before, made, refused = initiator.transport.worker.name, Agent.make, []

    def make(self: Agent, *arguments: Any) -> Any:
        if len(refused) < times:
            refused.append(self.name)
            raise NixlError("making a post: made up")
        return made(self, *arguments)

    monkeypatch.setattr(Agent, "make", make)
    initiator.memory[:4096] = 2
    initiator.post(2, target, Op.WRITE, PIECE, PIECE)
    pump(initiator, target, until=lambda: 2 in initiator.ended)
    if times == 1:
        assert initiator.done(2) and (target.memory[:4096] == 2).all()
    else:
        assert "made up" in initiator.failed(2).detail
        assert not (target.memory[:4096] == 2).any()
    assert refused[0] == before and before not in refused[1:]
    pump(initiator, target, until=lambda: getattr(initiator.transport.worker, "name", before) != before)
    works(pump, initiator, target, 3)


def test_a_backend_that_does_not_load_is_said_at_registration(sections: Any, name: str) -> None:
    transport = plugins.make_transport(name, {**sections[name], "peer": "a#0", "preload": ["/nowhere/libnothing.so"]})
    with pytest.raises(TransportError, match="NIXL cannot be used"):
        transport.register([])
    transport.close()


def test_an_idle_worker_sleeps(pair: Any, pump: Any) -> None:
    initiator, target = pair()
    works(pump, initiator, target, 1)
    pump(initiator, target, until=lambda: initiator.transport.worker.asleep and target.transport.worker.asleep)
    before = np.array([rank.transport.worker.turns for rank in (initiator, target)])
    for _ in range(20):
        select.select([initiator.transport, target.transport], [], [], 0.1)
        initiator.poll()
        target.poll()
    turns = np.array([rank.transport.worker.turns for rank in (initiator, target)]) - before
    assert (turns <= 10).all(), turns
