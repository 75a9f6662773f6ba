"""Rules R5 and R8: leases, patience, and an end to every wait. Each fails without its rule."""

from __future__ import annotations

from kvx.core.events import Abort, Claim
from kvx.core.legs import Limits
from kvx.core.messages import Ack, Renew, Revoke
from kvx.core.model import Mode, Outcome, Reason
from kvx_conformance.pair import Net
from kvx_conformance.scenes import expose, exposed, stage, writing

LIMITS = Limits()
GRACE = LIMITS.grace_s
LEASE = LIMITS.lease_s
PATIENCE = LIMITS.patience_s


def test_r5_a_grant_that_the_producers_engine_never_meets_ends_after_one_lease() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1))
    net.advance(LEASE + 1)
    assert len(p.offers()) == 1
    assert (d.outcome().reason, d.released()) == (Reason.LEASE_ENDED, 1)
    assert p.news == [n for n in p.news if not isinstance(n, Outcome)]


def test_r5_a_claim_keeps_the_lease_alive() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    net.advance(3 * LEASE)
    assert (p.states(), d.states()) == (["granted"], ["exposed"])
    renewals = len([m for m in p.sent(Renew) if isinstance(m, Renew) and m.transfers])
    assert 8 <= renewals <= 10


def test_r5_a_queued_reader_keeps_its_ticket_alive() -> None:
    net = Net()
    p, d, paper = exposed(net)
    d.put(Claim("t", Mode.PULL, paper))
    net.advance(3 * LEASE)
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    d.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)


def test_r5_an_ended_lease_is_never_renewed() -> None:
    net = Net()
    p, _d = writing(net)
    before = len(p.sent(Renew))
    net.now += LEASE + 0.1  # p did not run for a lease
    p.expire()
    assert len([m for m in p.sent(Renew)[before:] if isinstance(m, Renew) and m.transfers]) == 0
    assert p.states() == ["draining"]


def test_r5_without_a_renew_nothing_is_posted_in_the_last_fifth() -> None:
    limits = Limits(lost_s=1000.0, keepalive_s=1000.0)
    net = Net(limits=limits)
    p, d = net.pair()
    d.put(expose(1, 2, 3))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    p.put(stage(5, tokens=12, last=False))
    net.flow()
    p.cut()
    net.silent.add("d:0")
    net.advance(0.7 * LEASE, p)
    p.put(stage(6, first=1, tokens=12, last=False))
    assert len(p.posts()) == 2
    net.advance(0.15 * LEASE, p)
    p.put(stage(7, first=2, tokens=12))
    assert len(p.posts()) == 2


def test_r5_renewing_does_not_lengthen_patience() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    net.advance(PATIENCE + 1)
    assert (p.outcome().reason, d.outcome().ok) == (Reason.PATIENCE, False)


def test_r8_an_ack_that_never_comes() -> None:
    net = Net()
    p, d = writing(net)
    net.stop = lambda _, message: isinstance(message, Ack)
    p.end_ops()
    net.advance(LIMITS.ack_wait_s + 0.1)
    assert (p.outcome().reason, p.released(), d.outcome().ok) == (Reason.OVERDUE, 1, True)


def test_r8_operations_that_never_end() -> None:
    net = Net()
    p, d = writing(net)
    net.advance(LIMITS.op_timeout_s + LEASE + GRACE + 1)
    assert (p.outcome().reason, d.outcome().reason) == (Reason.OVERDUE, Reason.LEASE_ENDED)
    assert (p.states(), d.states(), p.released(), d.released()) == (["fencing"], ["fencing"], 0, 0)
    p.end_ops(ok=False)
    net.flow()
    assert (p.released(), d.released()) == (1, 1)


def test_r8_a_gap_between_parts() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1, 2))
    p.put(stage(5, tokens=8, last=False))
    net.flow()
    p.end_ops()
    net.advance(LIMITS.part_gap_s + 1)
    assert (p.outcome().reason, d.outcome().ok, d.released()) == (Reason.PATIENCE, False, 1)
    assert p.released() == 0  # its engine still owes the last part
    p.put(stage(6, first=1, tokens=8))
    assert p.released() == 1


def test_r8_a_grant_that_never_comes() -> None:
    net = Net()
    p, _d = net.pair()
    p.put(stage(5))
    net.advance(PATIENCE + 0.1)
    assert (p.outcome().reason, p.released()) == (Reason.PATIENCE, 1)


def test_r8_no_transfer_outlives_its_longest_time() -> None:
    limits = Limits(patience_s=1000.0, transfer_max_s=200.0)
    net = Net(limits=limits)
    p, d = net.pair()
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    net.advance(200.1)
    assert (p.outcome().reason, d.outcome().ok) == (Reason.OVERDUE, False)


def test_r8_revoke_is_asked_again_after_each_grace_and_each_reconnect() -> None:
    net = Net()
    p, d = writing(net)
    net.stop = lambda _, message: isinstance(message, Revoke)
    d.put(Abort("t"))
    net.advance(3 * GRACE + 0.1)
    assert 3 <= len(d.sent(Revoke)) <= 6
    before = len(d.sent(Revoke))
    p.cut()
    net.advance(1.0)
    assert len(d.sent(Revoke)) == before + 1
    net.stop = lambda _, message: False
    net.advance(GRACE)
    p.end_ops()
    net.flow()
    assert (d.released(), p.released()) == (1, 1)


def test_r8_nothing_open_means_nothing_to_wait_for() -> None:
    net = Net()
    p, d = writing(net)
    p.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)
    assert (p.endpoint.deadline(), d.endpoint.deadline()) == (None, None)
