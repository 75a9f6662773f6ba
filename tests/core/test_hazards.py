"""Known faults of other systems, by their ids in docs/hazards.md, which no rule's own test shows as they happened."""

from __future__ import annotations

import secrets

import pytest

from kvx.core import wire
from kvx.core.events import Abort, Claim, Connect, Expose, OpDone, OpFailed, PeerUp, Received
from kvx.core.legs import Limits
from kvx.core.messages import Ack, Command, Done, Envelope, Hello, Stopped
from kvx.core.model import BlockTable, Mode, Outcome, Reason
from kvx_conformance.pair import Net, Node, layout, ticket
from kvx_conformance.scenes import connected, expose, exposed, reading, stage, two_on_one, writing

LIMITS = Limits()


def finish(net: Net, *nodes: Node) -> None:
    for node in nodes:
        node.end_ops()
    net.flow()


def test_a11_a14_the_router_gives_back_a_ticket_that_no_reader_has_taken_up() -> None:
    net = Net()
    p, d, paper = exposed(net)
    p.put(PeerUp(90, None))
    nonce = secrets.token_bytes(16)
    challenge = p.endpoint.peers.handshakes.links[90].nonce
    text = wire.ticket_text(paper)
    proof = wire.command_proof(b"", challenge, "release", text, nonce)
    p.put(Received(90, Envelope(1, 0, p.info.epoch, Command("release", text, nonce, proof))))
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    d.end_ops()
    net.flow()
    assert not d.outcome().ok


def test_a11_a_ticket_that_was_taken_up_is_not_given_back() -> None:
    net = Net()
    p, d = reading(net)
    p.put(PeerUp(90, None))
    nonce = secrets.token_bytes(16)
    text = wire.ticket_text(ticket(p, 1, 2))
    proof = wire.command_proof(b"", p.endpoint.peers.handshakes.links[90].nonce, "release", text, nonce)
    p.put(Received(90, Envelope(1, 0, p.info.epoch, Command("release", text, nonce, proof))))
    assert [ack.ok for ack in p.sent(Ack) if isinstance(ack, Ack)] == [False]
    finish(net, d)
    assert (p.outcome().ok, d.outcome().ok) == (True, True)


def withdraw(p: Node, transfer: str = "t") -> bool:
    """What a producer answers to a router that takes a push back."""
    p.put(PeerUp(90, None))
    nonce = secrets.token_bytes(16)
    proof = wire.command_proof(b"", p.endpoint.peers.handshakes.links[90].nonce, "withdraw", transfer, nonce)
    p.put(Received(90, Envelope(1, 0, p.info.epoch, Command("withdraw", transfer, nonce, proof))))
    (ack,) = (ack for ack in p.sent(Ack) if isinstance(ack, Ack))
    return ack.ok


def test_a14_a_push_that_no_consumer_has_met_is_withdrawn() -> None:
    net = Net()
    p, d = net.pair()
    p.put(stage(5, 6))
    assert withdraw(p)
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)
    d.put(expose(1, 2))  # the consumer has its request after all
    net.flow()
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 1)


def test_a14_a_push_whose_consumer_is_there_goes_on() -> None:
    net = Net()
    p, d = writing(net)
    assert not withdraw(p)
    finish(net, p)
    assert (p.outcome().ok, d.outcome().ok) == (True, True)


def test_a14_a_push_that_is_withdrawn_before_its_engine_begins_it_ends_when_it_begins() -> None:
    """The router's word is faster than an engine whose request ends in the moment in which its client leaves."""
    net = Net()
    p, d = net.pair()
    assert withdraw(p)
    p.put(stage(5, 6))
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)
    d.put(expose(1, 2))
    net.flow()
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 1)
    assert p.states() == d.states() == []


def test_a14_a_pull_is_not_withdrawn() -> None:
    net = Net()
    p, _, _ = exposed(net)
    assert not withdraw(p)
    assert p.states() == ["exposed"]


@pytest.mark.parametrize("transfer", ["", "t" * 129])
def test_a14_what_is_no_id_is_not_remembered(transfer: str) -> None:
    net = Net()
    p, _ = net.pair()
    assert not withdraw(p, transfer)
    assert p.endpoint.snapshot()["tombstones"] == 0


def test_b3_each_rank_that_aborts_gets_its_own_answer() -> None:
    net = Net()
    p, d0, d1 = net.node("p"), net.node("d", layout(0, 2), epoch=5), net.node("d", layout(1, 2), epoch=5)
    for d in (d0, d1):
        d.put(expose(1))
    p.put(stage(5))
    net.flow()
    for d in (d0, d1):
        d.put(Abort("t"))
    net.flow()
    assert (d0.released(), d1.released()) == (0, 0)
    p.end_ops(ok=False)
    net.flow()
    assert len(p.sent(Stopped)) == 2
    assert (d0.released(), d1.released()) == (1, 1)


def test_c6_a_later_success_does_not_hide_a_failure() -> None:
    net = Net(most=1)
    p, d = writing(net)
    first, *others = p.posts()
    assert others
    p.put(OpFailed(first.op_id, detail="broken"))
    for post in others:
        p.put(OpDone(post.op_id, post.local.nbytes))
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (False, False)
    assert p.sent(Done) == []


def test_d2_one_failed_transfer_says_nothing_against_its_peer() -> None:
    net = Net()
    p, d = writing(net)
    p.end_ops(ok=False)
    net.flow()
    assert not p.outcome().ok
    for n in range(4):
        d.put(expose(1, transfer=f"next-{n}"))
        p.put(stage(5, transfer=f"next-{n}"))
        net.flow()
        finish(net, p)
        assert (p.outcome(f"next-{n}").ok, d.outcome(f"next-{n}").ok) == (True, True)


def test_d4_a_dead_producer_ends_its_own_transfers_and_no_others() -> None:
    net = Net()
    p, q, d = net.node("p"), net.node("q"), net.node("d")
    for n in range(3):
        d.put(expose(n, transfer=f"p{n}"))
        d.put(expose(3 + n, transfer=f"q{n}", p="q:0"))
        p.put(stage(n, transfer=f"p{n}"))
        q.put(stage(n, transfer=f"q{n}"))
    net.flow()
    net.kill(p)
    net.advance(LIMITS.lost_s + 1)
    finish(net, q)
    assert [d.outcome(f"p{n}").reason for n in range(3)] == [Reason.PEER_LOST] * 3
    assert [d.outcome(f"q{n}").ok for n in range(3)] == [True] * 3


def test_d5_j7_an_id_that_was_used_is_refused_and_harms_nobody() -> None:
    net = Net()
    p, d = writing(net)
    p.end_ops(ok=False)
    net.flow()
    d.put(expose(1))
    assert [type(news) for news in d.news].count(Outcome) == 1  # the first attempt's; the engine is told Released
    assert d.released() == 2
    assert d.states() == []


def test_e5_requests_that_wait_for_one_handshake_share_it_and_others_go_on() -> None:
    net = Net()
    p, q, d = net.node("p"), net.node("q"), net.node("d")
    d.put(expose(0, transfer="warm", p="q:0"))
    q.put(stage(0, transfer="warm"))
    net.flow()
    finish(net, q)
    net.silent.add("p:0")
    for n in range(10):
        d.put(expose(n, transfer=f"slow-{n}"))
    d.put(expose(12, transfer="quick", p="q:0"))
    q.put(stage(1, transfer="quick"))
    net.flow()
    finish(net, q)
    assert d.outcome("quick").ok
    assert len([a for a in d.of(Connect) if isinstance(a, Connect) and a.address == p.info.address]) == 1


def test_e7_a_stranger_learns_nothing_of_the_memory() -> None:
    net = Net(limits=LIMITS)
    p = net.node("p", key=b"a secret of sixteen bytes or more")
    p.put(PeerUp(90, None))
    key_id = wire.key_id(b"a secret of sixteen bytes or more")
    p.put(Received(90, Envelope(1, 9, 0, Hello(1, (1,), 9, bytes(16), key_id))))
    nonce = p.endpoint.peers.handshakes.links[90].nonce
    p.put(Received(90, Envelope(1, 9, 0, Hello(3, echo=nonce, proof=bytes(32), info=p.info))))
    assert all(hello.info is None and not hello.metadata for hello in p.sent(Hello) if isinstance(hello, Hello))
    assert p.endpoint.snapshot()["peers"] == {}


@pytest.mark.parametrize("ids", [("a:b:3", "a:b"), ("r-1", "r-11"), ("x", "X"), ("\N{SNOWMAN}", "\N{SNOWMAN} ")])
def test_j5_j8_ids_are_compared_whole_whatever_is_in_them(ids: tuple[str, str]) -> None:
    net = Net()
    p, d = net.pair()
    for n, transfer in enumerate(ids):
        d.put(expose(n, transfer=transfer))
        p.put(stage(n, transfer=transfer))
    net.flow()
    d.put(Abort(ids[0]))
    net.flow()
    assert d.states(ids[1]) == ["exposed"]
    finish(net, p)
    assert (d.outcome(ids[0]).ok, d.outcome(ids[1]).ok) == (False, True)


def test_j3_operations_that_end_at_once_are_told_like_all_others() -> None:
    class AtOnce(Net):
        def act(self, node: Node, action: object) -> None:
            super().act(node, action)  # type: ignore[arg-type]
            node.end_ops()

    net = AtOnce()
    p, d = net.pair()
    d.put(expose(1, 2))
    p.put(stage(5, tokens=8, last=False))
    p.put(stage(6, first=1, tokens=8))
    net.flow()
    assert (p.outcome().ok, d.outcome().ok, len(p.sent(Done))) == (True, True, 1)


def test_j6_a_late_word_of_an_earlier_attempt_changes_nothing() -> None:
    net = Net()
    p, d = connected(net)
    d.put(expose(1, transfer="try-1"))
    p.put(stage(5, transfer="try-1"))
    net.flow()
    old = next(m for m in p.sent(Done))
    p.end_ops(ok=False)
    net.flow()
    d.put(expose(1, transfer="try-2"))
    p.put(stage(5, transfer="try-2"))
    net.flow()
    d.hear(p, Done("try-1", (0,), (0,), old.plan if isinstance(old, Done) else ""))
    d.hear(p, Stopped("try-1", Reason.ABORTED))
    assert d.states("try-2") == ["exposed"]
    finish(net, p)
    assert (p.outcome("try-2").ok, d.outcome("try-2").ok) == (True, True)


def test_j9_n5_completions_are_a_set_of_ranks_and_no_count() -> None:
    net = Net()
    p0, p1, d = two_on_one(net)
    d.put(expose(1))
    for p in (p0, p1):
        p.put(Claim("t", Mode.PUSH))
    net.flow()
    for p in (p0, p1):
        p.put(stage(5))
    net.flow()
    p0.end_ops()
    net.flow()
    (done,) = p0.sent(Done)
    link = next(number for number, (other, _) in d.links.items() if other is p0)
    d.hear(p0, done, link=link)  # the same one again
    assert d.outcomes() == []
    finish(net, p1)
    assert d.outcome().ok


def test_k2_a_release_that_comes_before_the_blocks_is_remembered() -> None:
    net = Net()
    p, d = net.pair()
    d.put(Abort("t", ticket=ticket(p, 1, 2)))
    net.flow()
    p.put(expose(1, 2, mode=Mode.PULL))
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)


def test_h4_a_transfer_of_no_block_at_all_ends_in_one_round_trip() -> None:
    net = Net()
    p, d, paper = exposed(net)
    p.put(Expose("none", Mode.PULL, BlockTable(((),)), (2,), 8, 30.0))
    d.put(
        stage(first=2, transfer="none", tokens=8, mode=Mode.PULL, with_=ticket(p, transfer="none", first=2, tokens=8))
    )
    net.flow()
    assert (p.outcome("none").ok, d.outcome("none").ok, d.posts()) == (True, True, [])
    assert paper.grant.transfer == "t"


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_k2_reads_that_come_before_the_owners_expose_are_posted_again(most: int) -> None:
    net = Net(most=most)
    p, d = net.pair()
    d.put(stage(8, 9, mode=Mode.PULL, with_=ticket(p, 1, 2)))
    net.flow()
    first = d.posts()
    for post in first:
        d.put(OpFailed(post.op_id, Reason.UNKNOWN_TRANSFER, "nothing is permitted"))
    assert (d.states(), d.outcomes()) == (["moving"], [])
    net.ended[id(d)] |= {post.op_id for post in first}
    p.put(expose(1, 2, mode=Mode.PULL))
    net.advance(1)
    again = d.posts()[len(first) :]
    assert [post.local.pieces() for post in again] == [post.local.pieces() for post in first]
    finish(net, d)
    assert (p.outcome().ok, d.outcome().ok, d.outcome().bytes) == (True, True, p.outcome().bytes)


def test_k2_reads_of_blocks_that_are_never_exposed_end_after_one_grace() -> None:
    net = Net()
    p, d = net.pair()
    d.put(stage(8, 9, mode=Mode.PULL, with_=ticket(p, 1, 2)))
    net.flow()
    for _ in range(int(LIMITS.grace_s / 0.1) + 2):
        for post in d.posts():
            d.put(OpFailed(post.op_id, Reason.UNKNOWN_TRANSFER, "nothing is permitted"))
        net.advance(0.11)
    assert (d.outcome().reason, d.released()) == (Reason.UNKNOWN_TRANSFER, 1)
    assert net.now - 1000 <= LIMITS.grace_s + 1.5


def test_l1_l5_each_kind_of_end_has_its_own_counter_and_they_add_up() -> None:
    net = Net()
    p, d = connected(net)
    d.put(expose(1, transfer="expired"))
    net.advance(LIMITS.lease_s + 1)
    d.put(expose(2, transfer="broken"))
    p.put(stage(6, transfer="broken"))
    net.flow()
    p.end_ops(ok=False)
    net.flow()
    d.put(expose(3, transfer="nobody", p="x:0"))
    counts = d.endpoint.snapshot()["counts"]
    assert counts == {"started": 4, "ok": 1, "failed.lease_ended": 1, "failed.transport": 1, "failed.peer_lost": 1}
