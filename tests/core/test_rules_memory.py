"""Rules R1, R2, R4 and R7: when blocks are free again, and what the engine is told. Each fails without its rule."""

from __future__ import annotations

from kvx.core.events import Abort, Claim, Fence
from kvx.core.legs import Limits
from kvx.core.messages import Ack, GrantMessage, Renew, Revoke, Stopped
from kvx.core.model import Access, FenceScope, Mode, Reason
from kvx_conformance.pair import Net
from kvx_conformance.scenes import expose, exposed, reading, stage, writing

LIMITS = Limits()
GRACE = LIMITS.grace_s
LEASE = LIMITS.lease_s


def test_r1_time_alone_frees_nothing() -> None:
    net = Net()
    _p, d = writing(net)
    net.silent.add("p:0")
    net.advance(20 * LIMITS.transfer_max_s, d)
    assert not d.outcome().ok
    assert (d.released(), d.states()) == (0, ["fencing"])


def test_r1_a_late_word_of_the_writer_frees() -> None:
    net = Net()
    p, d = writing(net)
    net.silent.add("p:0")
    net.advance(LEASE + 2 * GRACE, d)
    assert d.released() == 0
    net.silent.clear()
    p.put(Abort("t"))
    p.end_ops(ok=False)
    net.advance(2 * GRACE)
    assert (d.released(), d.states()) == (1, [])


def test_r1_another_epoch_of_the_writer_frees_after_the_quarantine() -> None:
    net = Net()
    p, d = writing(net)
    net.silent.add("p:0")
    net.advance(LEASE + 2 * GRACE, d)
    net.silent.clear()
    net.kill(p)
    net.advance(2 * GRACE, d)  # nobody is there: that proves nothing
    assert d.released() == 0
    net.node("p")
    net.advance(GRACE + LIMITS.quarantine_s + 0.1, d)  # d asks again and meets the new start
    assert (d.released(), d.states()) == (1, [])


def test_r1_quarantine_outlasts_the_dead_writers_last_bytes() -> None:
    net = Net()
    p, d = writing(net)
    net.kill(p)
    again = net.node("p")
    net.advance(0.5)  # d dials again, and another epoch answers
    assert d.outcome().reason is Reason.EPOCH
    assert (d.released(), d.states()) == (0, ["fencing"])
    net.advance(LIMITS.quarantine_s - 1)
    d.hear(again, Stopped("t", Reason.UNKNOWN_TRANSFER))
    assert d.released() == 0
    net.advance(1.1)
    assert d.released() == 1


def test_r1_a_transport_that_forbids_frees_at_once() -> None:
    net = Net(access=Access.GRANT)
    p, d = writing(net)
    d.put(Abort("t"))
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 1)
    region = Net()
    p, d = writing(region)
    d.put(Abort("t"))
    region.flow()
    assert (d.news, p.states()) == ([], ["draining"])
    p.end_ops()
    region.flow()
    assert (d.outcome().reason, d.released(), p.released()) == (Reason.ABORTED, 1, 1)


def test_r2_a_fence_raises_the_generation_and_older_grants_die() -> None:
    net = Net(fence=FenceScope.PEER)
    _p, d = writing(net)
    d.put(expose(3, transfer="sibling"))
    net.flow()
    assert d.states("sibling") == ["exposed"]
    net.stop = lambda _, message: isinstance(message, Revoke)
    d.put(Abort("t"))
    net.advance(GRACE + 0.1)
    fences = [action for action in d.of(Fence) if isinstance(action, Fence)]
    assert [fence.generation for fence in fences] == [1]
    assert (d.released(), d.outcome("sibling").ok, d.released("sibling")) == (1, False, 1)
    assert d.outcome("sibling").reason is Reason.PEER_LOST
    d.put(expose(4, transfer="later"))
    net.advance(1.0)
    grants = [m.grant for m in d.sent(GrantMessage) if isinstance(m, GrantMessage) and m.grant.transfer == "later"]
    assert {grant.generation for grant in grants} == {1}
    assert {permit.stamp.generation for permit in d.permits() if permit.transfer == "later"} == {1}


def test_r4_a_read_target_ends_with_its_lease_and_the_reader_learns_it() -> None:
    net = Net(limits=Limits(op_timeout_s=60.0))
    p, d = reading(net)
    net.stop = lambda _, message: (
        isinstance(message, Revoke) or (isinstance(message, Renew) and bool(message.transfers))
    )
    net.advance(LEASE + 0.1)
    assert (p.outcome().reason, p.released(), p.states()) == (Reason.LEASE_ENDED, 1, [])
    assert (d.news, d.states()) == ([], ["moving"])
    d.end_ops()
    net.flow()
    assert (d.outcome().reason, d.released()) == (Reason.LEASE_ENDED, 1)


def test_r4_bytes_may_be_used_only_after_the_ack() -> None:
    net = Net()
    p, d = reading(net)
    net.stop = lambda node, message: isinstance(message, Ack)
    d.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcomes()) == (True, [])
    net.advance(LIMITS.ack_wait_s + 0.1)
    assert not d.outcome().ok


def test_r7_one_outcome_and_one_released_however_many_parts() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1, 2, 3))
    for first in range(3):
        p.put(stage(5 + first, first=first, tokens=12, last=first == 2))
        net.flow()
    p.end_ops()
    net.flow()
    net.advance(5.0)
    p.put(Abort("t"))
    d.put(Abort("t"))
    net.advance(10 * LEASE)
    for node in (p, d):
        assert (node.outcome().ok, node.released()) == (True, 1)


def test_r7_an_abort_before_any_call_is_owed_nothing() -> None:
    net = Net()
    p, d, paper = exposed(net)
    d.put(Abort("t", ticket=paper))
    net.flow()
    assert d.news == []
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 1)


def test_r7_late_parts_are_answered_by_the_outcome_first_and_released_last() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1, 2))
    net.flow()
    d.put(Abort("t"))
    net.flow()
    assert p.outcomes() == []
    p.put(stage(5, tokens=8, last=False))
    assert (p.outcome().ok, p.released()) == (False, 0)
    p.put(stage(6, first=1, tokens=8))
    assert (len(p.outcomes()), p.released()) == (1, 1)


def test_r7_a_late_claim_is_owed_its_outcome_only() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1))
    net.flow()
    d.put(Abort("t"))
    net.flow()
    p.put(Claim("t", Mode.PUSH))
    p.put(Abort("t"))
    assert (p.outcome().reason, p.released()) == (Reason.ABORTED, 0)


def test_r7_outcome_comes_in_quarantine_and_released_later() -> None:
    net = Net()
    p, d = writing(net)
    net.silent.add("p:0")
    d.put(Abort("t"))
    net.advance(GRACE + 0.1, d)
    assert (d.outcome().reason, d.released()) == (Reason.ABORTED, 0)
    net.silent.clear()
    p.end_ops(ok=False)
    net.advance(2 * GRACE)
    assert (len(d.outcomes()), d.released()) == (1, 1)
