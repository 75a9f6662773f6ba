"""Rules R3, R9, R11 and R15: who may say what, and what it is answered. Each fails without its rule."""

from __future__ import annotations

import secrets

import pytest
from attrs import evolve

from kvx.core import wire
from kvx.core.events import Abort, Claim, Disconnect, Drain, Expose, Received
from kvx.core.legs import Limits
from kvx.core.messages import Ack, Done, Envelope, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import Access, BlockTable, Mode, Reason
from kvx_conformance.pair import KEY, Net, Node, ticket
from kvx_conformance.scenes import connected, expose, exposed, stage, writing

LIMITS = Limits()
LEASE = LIMITS.lease_s
PATIENCE = LIMITS.patience_s


def test_r3_an_envelope_of_another_epoch_does_not_act() -> None:
    net = Net()
    p, d = writing(net)
    for from_epoch, to_epoch in ((p.info.epoch + 1, d.info.epoch), (p.info.epoch, d.info.epoch + 1)):
        assert d.hear(p, Stopped("t", Reason.ABORTED), from_epoch=from_epoch, to_epoch=to_epoch) == []
        assert d.states() == ["exposed"]
    assert d.hear(p, Stopped("t", Reason.ABORTED))
    assert d.states() == []


def test_r3_an_epoch_is_believed_only_from_an_echo() -> None:
    net = Net()
    p, d = net.pair()
    old: list[Hello] = []
    net.stop = lambda _, message: isinstance(message, Hello) and bool(old.append(message))
    d.put(expose(1))
    net.flow()
    third = old[2]
    assert third.step == 3
    d.cut()
    net.stop = lambda _, message: isinstance(message, Hello) and message.step == 3
    d.put(expose(2, transfer="u"))
    net.advance(0.5)
    before = p.endpoint.snapshot()["peers"]
    number = p.link
    p.put(Received(number, Envelope(1, d.info.epoch, p.info.epoch, third)))
    assert (p.endpoint.snapshot()["peers"], before) == (before, {"d#0": 0})


def test_r3_a_handshake_does_not_begin_again_on_its_connection() -> None:
    net = Net()
    p, d = net.pair()
    said: list[Hello] = []
    net.stop = lambda _, message: isinstance(message, Hello) and message.step == 3 and not said.append(message)
    p.put(Claim("t", Mode.PULL, ticket(d, 1)))
    net.flow()
    assert d.hear(p, Hello(1, (1,), 99, secrets.token_bytes(16), wire.key_id(KEY))) == []
    (third,) = said
    d.hear(p, third)
    assert list(d.endpoint.snapshot()["peers"]) == ["p#0"]


def test_r3_a_message_before_the_handshakes_end_waits_for_it() -> None:
    net = Net()
    p, d, paper = exposed(net)
    held: list[tuple[Node, Message]] = []
    net.stop = lambda node, message: (
        isinstance(message, Hello) and message.step == 4 and not held.append((node, message))
    )
    d.put(Claim("t", Mode.PULL, paper))
    net.flow()
    p.put(Abort("t"))
    assert not p.sent(Revoke)
    revoke = Envelope(1, p.info.epoch, d.info.epoch, Revoke("t", Reason.ABORTED))
    d.put(Received(d.link, revoke))
    assert d.outcomes() == []
    _node, hello = held[0]
    d.hear(p, hello)
    assert d.outcome().reason is Reason.ABORTED


def test_r3_another_start_ends_what_the_old_one_had_open() -> None:
    net = Net(access=Access.GRANT)
    _p, d = writing(net)
    again = net.node("p")
    again.put(Expose("new", Mode.PUSH, BlockTable.of([1]), (0,), 4, LEASE, "d:0"))
    net.flow()
    assert d.outcome().reason is Reason.EPOCH
    assert d.of(Disconnect)


@pytest.mark.parametrize(
    ("word", "answer"),
    [(Revoke("x", Reason.ABORTED), Stopped), (Renew(("x",)), Revoke), (Done("x", (0,), (0,), "plan"), Ack)],
)
def test_r9_a_transfer_never_heard_of_is_answered(word: Message, answer: type[Message]) -> None:
    net = Net()
    p, d = connected(net)
    before = len(d.sent(answer))
    d.hear(p, word)
    net.advance(LEASE + 0.1)
    (said,) = d.sent(answer)[before:]
    assert getattr(said, "transfer", "") == "x"
    assert not isinstance(said, Ack) or not said.ok


def test_r9_a_repeated_done_gets_the_same_answer_and_no_other_one_does() -> None:
    net = Net()
    p, d = connected(net)
    (done,) = p.sent(Done)
    d.hear(p, done)
    stranger = net.node("q")
    stranger.put(Claim("other", Mode.PUSH, address="d:0"))
    net.flow()
    d.hear(stranger, done)
    assert [m.ok for m in d.sent(Ack) if isinstance(m, Ack)] == [True, True, False]


def test_r9_a_ticket_is_good_for_one_reader() -> None:
    net = Net()
    p, d, paper = exposed(net)
    e = net.node("e")
    d.put(Claim("t", Mode.PULL, paper))
    net.flow()
    e.put(stage(3, 4, mode=Mode.PULL, with_=paper))
    net.flow()
    e.end_ops()
    net.flow()
    assert not e.outcome().ok
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    d.end_ops()
    net.flow()
    assert (d.outcome().ok, p.outcome().ok) == (True, True)


def test_r9_a_second_reader_is_told_so_at_once() -> None:
    net = Net()
    _p, d, paper = exposed(net)
    e = net.node("e")
    for reader in (d, e):
        reader.put(Claim("t", Mode.PULL, paper))
        net.flow()
    assert (d.states(), e.outcome().reason) == (["granted"], Reason.UNKNOWN_TRANSFER)


def test_r9_a_stranger_does_not_bind_a_push_that_waits_for_its_grant() -> None:
    net = Net()
    p, d = net.pair()
    p.put(Claim("t", Mode.PUSH))
    other = net.node("other")
    other.put(expose(3, transfer="u"))
    net.flow()
    d.put(expose(1))
    net.flow()
    p.put(stage(5))
    p.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)


def test_r9_an_abort_that_overtakes_its_grant_is_remembered() -> None:
    net = Net()
    p, d = net.pair()
    grants: list[Message] = []
    net.stop = lambda _, message: isinstance(message, GrantMessage) and not grants.append(message)
    d.put(expose(1))
    net.flow()
    d.put(Abort("t"))
    net.flow()
    p.hear(d, grants[0])
    net.flow()
    assert (p.offers(), p.states()) == ([], [])
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 1)
    p.put(stage(5))
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)


def test_r9_a_done_waits_one_grace_for_the_exposing_engine() -> None:
    net = Net()
    p, d = net.pair()
    paper = ticket(p, 1, 2)
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    d.end_ops()
    net.flow()
    assert p.sent(Ack) == []
    p.put(expose(1, 2, mode=Mode.PULL))
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)


def test_r9_short_memory_refuses_new_grants_and_forgets_nothing_young() -> None:
    net = Net()
    p, d = net.node("p", limits=Limits(tombstones=2)), net.node("d")
    for name in ("a", "b"):
        d.put(expose(1, transfer=name))
        net.flow()
        d.put(Abort(name))
        net.flow()
    d.put(expose(2, transfer="c"))
    net.flow()
    assert d.outcome("c").reason is Reason.NO_CAPACITY
    net.advance(6 * LEASE)
    d.put(expose(2, transfer="late"))
    net.flow()
    d.put(Abort("late"))
    net.flow()
    p.put(Claim("late", Mode.PUSH))
    assert p.outcome("late").reason is Reason.ABORTED


def test_r9_an_abort_before_the_grant_was_sent_is_sent_in_its_place() -> None:
    net = Net()
    p, d = net.pair()
    net.stop = lambda _, message: isinstance(message, Hello) and message.step == 2
    d.put(expose(1))
    p.put(stage(5))
    net.flow()
    d.put(Abort("t"))
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 1)
    net.stop = lambda _, message: False
    d.cut()
    net.advance(1.0)
    d.put(expose(3, transfer="next"))
    net.flow()
    assert not p.outcomes() or p.outcome().reason is Reason.ABORTED


def test_r11_a_restart_ends_with_epoch_and_another_loss_with_peer_lost() -> None:
    net = Net(access=Access.GRANT)
    p, d = writing(net)
    net.kill(p)
    net.node("p")
    net.advance(1.0, d)
    assert d.outcome().reason is Reason.EPOCH
    net = Net(access=Access.GRANT)
    p, d = writing(net)
    net.silent.add("p:0")
    net.advance(LIMITS.lost_s + 1, d)
    assert d.outcome().reason is Reason.PEER_LOST


def test_r11_a_ticket_of_another_start_moves_no_byte() -> None:
    net = Net()
    p, d, paper = exposed(net)
    net.kill(p)
    net.node("p")
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    assert (d.outcome().reason, d.posts(), d.released()) == (Reason.EPOCH, [], 1)


def test_r11_patience_counts_from_the_first_claim() -> None:
    net = Net()
    _p, d, paper = exposed(net)
    for _ in range(4):
        d.put(Claim("t", Mode.PULL, paper))
        net.advance(PATIENCE / 4)
    net.advance(0.1)
    assert d.outcome().reason is Reason.PATIENCE


def test_r11_a_preempted_producer_drains_and_says_stopped() -> None:
    net = Net()
    p, d = writing(net)
    p.put(Abort("t", Reason.PREEMPTED))
    net.flow()
    assert (p.states(), d.outcomes()) == (["draining"], [])
    p.end_ops()
    net.flow()
    assert (p.outcome().reason, d.outcome().reason) == (Reason.PREEMPTED, Reason.PREEMPTED)
    assert (p.released(), d.released()) == (1, 1)


def test_r11_a_drained_instance_takes_nothing_new() -> None:
    net = Net()
    p, d = connected(net)
    p.put(Drain(5.0))
    d.put(expose(2, transfer="new"))
    p.put(Claim("claimed", Mode.PUSH))
    net.flow()
    assert (d.outcome("new").reason, p.outcome("claimed").reason) == (Reason.DRAINING, Reason.DRAINING)


def test_r15_a_secret_of_another_name_is_told_so() -> None:
    net = Net()
    net.node("p", key=KEY)
    d = net.node("d", key=KEY[::-1])
    d.put(expose(1))
    net.flow()
    assert d.outcome().reason is Reason.AUTH
    assert "secrets differ" in d.outcome().detail


def test_r15_a_proof_is_checked_and_not_only_the_keys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    p = net.node("p", key=KEY)
    d = net.node("d", key=KEY)
    net.stop = lambda node, message: isinstance(message, Hello) and message.step == 3
    d.put(expose(1))
    net.flow()
    (third,) = [m for m in d.sent(Hello) if isinstance(m, Hello) and m.step == 3]
    p.hear(d, evolve(third, proof=bytes(32)))
    refusals = [m for m in p.sent(Hello) if isinstance(m, Hello) and m.refusal is not None]
    assert [refusal.refusal for refusal in refusals] == [Reason.AUTH]
    assert p.endpoint.snapshot()["peers"] == {}


def test_r15_a_ticket_that_was_changed_does_not_hold() -> None:
    net = Net()
    p = net.node("p", key=KEY)
    good = wire.make_ticket(ticket(p, 1, 2).grant, KEY)
    assert p.endpoint.ticket_holds(wire.parse_ticket(wire.ticket_text(good)))
    more = evolve(good, grant=evolve(good.grant, blocks=BlockTable.of([1, 2, 3])))
    assert not p.endpoint.ticket_holds(wire.parse_ticket(wire.ticket_text(more)))
