"""The scripted peer says and hears what it is told to, and the table of protocol cases has no hole without a reason."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvx.core import wire
from kvx.core.messages import Ack, Envelope, Hello, Message, Renew, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance import rules
from kvx_conformance.catalogue import SCENARIOS
from kvx_conformance.hazards import STARRED
from kvx_conformance.suite.all import CASES
from kvx_conformance.suite.broken_instances import BROKEN_INSTANCES
from kvx_conformance.suite.case import Context, Finding
from kvx_conformance.suite.encounter import Encounter, Step
from kvx_conformance.suite.line import Line
from kvx_conformance.suite.protocol_scenarios import ABOUT
from kvx_conformance.suite.scripted import ScriptedPeer
from kvx_conformance.suite.subject import Subject

WITHOUT_CASE = {
    "KVX-ENV-005": "What is cut is never seen from outside; an engine's own detail does not pass through a case.",
    "KVX-TIM-003": "A Renew that was not sent cannot be told from one that was, but by the initiator itself.",
    "KVX-TIM-004": "A courtesy that nobody relies on.",
    "KVX-UNK-002": "A memory of 65,536 transfers is filled in tests/core, not over a wire.",
}
"""Sentences of the protocol that no case of the suite shows, and why."""
EPOCH, THEIRS = 5, 9


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    subject = Subject("tcp")
    transport = subject.make_transport("declares")
    made = Context(subject, transport.capabilities, tmp_path, random.Random(1))  # noqa: S311 - data of a test
    transport.close()
    yield made
    made.close()


def impatient(peers: list[ScriptedPeer]) -> Callable[[Callable[[], object], str], None]:
    """Waits for what is on its way, and no longer."""

    def until(holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 0.2
        while not holds():
            for peer in peers:
                peer.serve()
            if time.monotonic() > end:
                raise Finding(what)

    return until


@pytest.fixture
def wire_end(context: Context) -> Iterator[tuple[Line, socket.socket]]:
    """A line of a scripted peer whose other end is a bare socket, with a handshake behind it."""
    peers: list[ScriptedPeer] = []
    peer = ScriptedPeer(context, impatient(peers), "peer", epoch=EPOCH)
    peers.append(peer)
    end, far = socket.socketpair()
    line = Line(peer, end, dialler=True, their_epoch=THEIRS)
    peer.lines.append(line)
    with end, far:
        yield line, far


def frame(message: Message, from_epoch: int = THEIRS, to_epoch: int = EPOCH) -> bytes:
    data = wire.encode(Envelope(wire.VERSION, from_epoch, to_epoch, message))
    return len(data).to_bytes(4) + data


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\1\xc1",
        b"\xff\xff\xff\xff",
        frame(Ack("t", True), from_epoch=THEIRS + 1),
        frame(Ack("t", True), to_epoch=EPOCH + 1),
    ],
    ids=["no envelope", "too long", "another sender's epoch", "another receiver's epoch"],
)
def test_what_an_instance_must_not_send_is_a_finding(wire_end: tuple[Line, socket.socket], data: bytes) -> None:
    line, far = wire_end
    far.sendall(data)
    with pytest.raises(Finding):
        line.serve()


def test_messages_are_heard_in_order_and_those_before_are_passed_over(wire_end: tuple[Line, socket.socket]) -> None:
    line, far = wire_end
    far.sendall(frame(Ack("t", True)) + frame(Stopped("u", Reason.ABORTED)) + frame(Ack("v", False)))
    assert line.hear(Stopped).transfer == "u"
    assert line.hear(Ack).transfer == "v"
    assert [type(message) for message in line.heard] == [Ack, Stopped, Ack]


def test_what_does_not_come_is_a_finding(wire_end: tuple[Line, socket.socket]) -> None:
    line, far = wire_end
    far.sendall(frame(Ack("t", True)))
    with pytest.raises(Finding, match="a Ack for u comes"):
        line.hear(Ack, "u")
    far.close()
    with pytest.raises(Finding, match="hung up"):
        line.hear(Stopped)


def test_only_a_polite_peer_answers_keepalives(wire_end: tuple[Line, socket.socket]) -> None:
    line, far = wire_end
    far.sendall(frame(Renew(echo=True)))
    line.serve()
    answer = frame(Renew(), from_epoch=EPOCH, to_epoch=THEIRS)
    assert far.recv(1 << 16) == answer
    line.peer.polite = False
    far.sendall(frame(Renew(echo=True)))
    line.serve()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    assert line.pings == 2


def test_what_a_newer_peer_says_is_read_alike(wire_end: tuple[Line, socket.socket]) -> None:
    line, _ = wire_end
    plain = line.bytes_of(Stopped("t", Reason.ABORTED))
    line.peer.newer = True
    newer = line.bytes_of(Stopped("t", Reason.ABORTED))
    assert newer != plain
    assert wire.decode(newer) == wire.decode(plain)


def test_a_forged_proof_is_not_the_true_one(wire_end: tuple[Line, socket.socket]) -> None:
    line, _ = wire_end
    line.their_nonce = b"n" * 16
    assert line.hello(3).proof == line.proof()
    assert len({line.proof(), line.proof(own_epoch=1), line.proof(dialler=False), line.proof(key=b"k")}) == 4


@pytest.mark.parametrize("key", ["", "a secret of this test alone"])
def test_every_role_comes_to_its_good_end(context: Context, key: str) -> None:
    encounter = Encounter(context, key=key)
    for facing in encounter.everywhere(Step.MOVING):
        facing.well()
    assert len(encounter.toy.told) == 4
    encounter.over()
    assert context.checks > 10


def test_bytes_that_are_wrong_are_found(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.EXPOSED)
    facing.peer.cache.poison(facing.mine.groups[0][:1])
    with pytest.raises(Finding, match="its bytes are wrong"):
        facing.well()


def test_a_touched_bystander_is_found(context: Context) -> None:
    encounter = Encounter(context)
    encounter.intact()
    encounter.toy.actor.cache.poison(range(24))
    with pytest.raises(Finding, match="bystander"):
        encounter.intact()


def test_a_recorded_hello_is_the_bytes_that_went_out(context: Context) -> None:
    encounter = Encounter(context)
    line = encounter.peer().dial(encounter.toy.info.address).greet()
    size = int.from_bytes(line.sent[:4])
    first = wire.decode(bytes(line.sent[4 : 4 + size])).message
    assert isinstance(first, Hello) and first.nonce == line.nonce


def test_sentences_without_a_case_are_listed_with_their_reasons() -> None:
    shown = {case.rule for case in CASES.values()}
    without = {rule.id for rule in rules.load()[1]} - shown
    assert without == WITHOUT_CASE.keys()


def test_every_scenario_is_one_case() -> None:
    assert sorted(f"KVX-{number}" for numbers in ABOUT.values() for number in numbers) == sorted(SCENARIOS)


def test_every_starred_hazard_has_a_scenario_in_the_suite() -> None:
    names = {case.name for case in CASES.values()}
    played = [scenario for scenario in SCENARIOS.values() if scenario.id[4:].lower() in names]
    assert set(STARRED) <= {hazard for scenario in played for hazard in scenario.hazards}


@pytest.mark.parametrize("name", BROKEN_INSTANCES)
def test_broken_instances_can_be_opened_and_are_to_be_found_by_cases_that_exist(name: str) -> None:
    broken = BROKEN_INSTANCES[name]
    assert callable(broken.subject.opener())
    for begin in broken.found_by:
        assert any(case.startswith(begin) for case in CASES), begin
