"""What a peer may say, proven or not, costs it something and nobody else; found by the fuzzer and kept here."""

from __future__ import annotations

import pytest

from kvx.core import handshake
from kvx.core.events import Claim, Event, PeerUp, Received
from kvx.core.legs import Limits
from kvx.core.messages import Done, Envelope, GrantMessage, Hello, Revoke, Stopped
from kvx.core.model import BlockTable, Grant, Mode, Outcome, Reason, Released
from kvx_conformance.pair import Net, Node, ticket
from kvx_conformance.scenes import connected, expose, exposed, stage


def granting(owner: Node, transfer: str = "t") -> GrantMessage:
    """A grant that nobody asked for."""
    info = owner.info
    grant = Grant(transfer, info.peer, info.epoch, 0, Mode.PUSH, (0,), BlockTable.of([1]), 4, 30.0, info.address)
    return GrantMessage(grant, (0,), "")


@pytest.mark.parametrize(
    ("call", "handed"),
    [
        (expose(3, mode=Mode.PULL), 1),
        (expose(3, p="p:0"), 1),
        (Claim("t", Mode.PULL, ticket(Net().node("p"), 1)), 0),
    ],
)
def test_an_id_that_a_peers_grant_has_taken_gives_the_engine_its_outcome(call: Event, handed: int) -> None:
    net = Net()
    p, d = connected(net)
    d.hear(p, granting(p))
    d.put(call)
    net.flow()
    assert [type(news) for news in d.news if getattr(news, "transfer", "") == "t"] == [Outcome, Released][: handed + 1]
    assert d.outcome().reason is not Reason.OTHER
    assert not d.outcome().ok
    assert d.states() == []


@pytest.mark.parametrize("kind", [Revoke, Stopped])
def test_words_about_transfers_never_heard_of_take_bounded_memory(kind: type[Revoke | Stopped]) -> None:
    net = Net(limits=Limits(tombstones=50))
    p, d = connected(net)
    for n in range(500):
        d.hear(p, kind(f"t-{n}", Reason.ABORTED, "x" * 1000))
    assert d.endpoint.snapshot()["tombstones"] == 100
    # One is the transfer before. What could not be remembered was not answered either: the answer frees blocks.
    assert len(d.sent(Stopped)) == (99 if kind is Revoke else 0)
    net.advance(120)
    d.put(expose(1, transfer="later"))
    p.put(stage(5, transfer="later"))
    net.flow()
    p.end_ops()
    net.flow()
    assert d.outcome("later").ok


def test_a_stranger_parks_little() -> None:
    net = Net()
    d = net.node("d")
    p = net.node("p")
    d.put(PeerUp(99, None))
    for _ in range(200):
        d.put(Received(99, Envelope(1, p.info.epoch, d.info.epoch, Done("t", tuple(range(4000)), (0,), ""))))
    (link,) = [link for link in d.endpoint.peers.handshakes.links.values() if link.number == 99]
    assert 1 <= len(link.parked) <= handshake.PARKED_BYTES // 4000
    assert d.endpoint.snapshot()["dropped"] == 200 - len(link.parked)


def test_plans_with_earlier_starts_of_a_peer_are_forgotten() -> None:
    net = Net()
    p = net.node("p")
    for _ in range(20):
        d = net.node("d")
        d.put(expose(1, transfer=str(d.info.epoch)))
        p.put(stage(5, transfer=str(d.info.epoch)))
        net.flow()
        p.end_ops()
        net.flow()
        assert d.outcome(str(d.info.epoch)).ok
        net.kill(d)
    assert len(p.endpoint._contacts._plans) == 1


def test_a_hello_after_the_handshake_changes_nothing() -> None:
    net = Net()
    p, d, paper = exposed(net)
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    for step in range(1, 5):
        p.hear(d, Hello(step, (1,), 99, bytes(16), "", bytes(16), bytes(32)))
    d.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)
