"""Rules R6, R10, R13 and R14: which bytes move, between whom, and when that counts. Each fails without its rule."""

from __future__ import annotations

import pytest
from attrs import evolve

from kvx.core.events import Claim, Expose, OpDone, OpFailed, Stage
from kvx.core.legs import Limits
from kvx.core.messages import Done, GrantMessage, Message, Stopped
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Reason
from kvx_conformance.pair import Net, layout, part, ticket
from kvx_conformance.scenes import expose, reading, stage, two_on_one, writing

LIMITS = Limits()
LEASE = LIMITS.lease_s


def test_r6_one_failed_leg_aborts_its_siblings_at_once() -> None:
    net = Net()
    p0, p1, d = two_on_one(net)
    d.put(expose(1))
    for p in (p0, p1):
        p.put(Claim("t", Mode.PUSH))
    net.flow()
    for p in (p0, p1):
        p.put(stage(5))
    net.flow()
    p0.end_ops(ok=False)
    net.flow()
    assert (p0.released(), p1.states(), d.states()) == (1, ["draining"], ["failed", "revoking"])
    p1.end_ops()
    net.flow()
    assert [node.outcome().reason for node in (p0, p1, d)] == [Reason.TRANSPORT] * 3
    assert [node.released() for node in (p0, p1, d)] == [1, 1, 1]


def test_r6_a_part_that_fails_the_transfer_on_one_leg_reaches_no_other() -> None:
    net = Net()
    p, d0, d1 = net.node("p"), net.node("d", layout(0, 2), epoch=5), net.node("d", layout(1, 2), epoch=5)
    for d in (d0, d1):
        d.put(expose(1, 2))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    assert p.states() == ["granted", "granted"]
    p.put(stage(5, first=1, tokens=8))  # the last part, and block 0 is missing
    net.flow()
    assert [node.outcome().reason for node in (p, d0, d1)] == [Reason.BOUNDS] * 3


def test_r6_a_grant_that_fails_the_transfer_on_one_leg_reaches_no_other() -> None:
    net = Net()
    p0, p1, d = two_on_one(net)
    paper = ticket(p0, 1, 2)
    for p in (p0, p1):
        p.put(expose(1, 2, mode=Mode.PULL))
    d.put(expose(7, transfer="first", p="p:0"))  # both ranks are known and connected
    net.flow()
    d.put(stage(8, first=1, tokens=12, mode=Mode.PULL, with_=paper))  # 12 tokens are wanted, 8 are there
    assert d.outcome().reason is Reason.BOUNDS


def test_r6_blocks_that_come_before_the_second_rank_is_met_wait_for_it() -> None:
    net = Net()
    p0, p1, d = two_on_one(net)
    net.silent.add("p:1")
    d.put(Claim("t", Mode.PUSH, address="p:0"))
    net.flow()
    d.put(expose(1))
    net.flow()
    assert (len(p0.offers()), p1.offers()) == (1, [])
    net.silent.clear()
    net.advance(LIMITS.handshake_s + 0.1)
    assert d.outcome().reason is Reason.PEER_LOST
    d.put(expose(2, transfer="again"))
    for p in (p0, p1):
        p.put(stage(5, transfer="again"))
    net.flow()
    for p in (p0, p1):
        p.end_ops()
    net.flow()
    assert d.outcome("again").ok


def test_r6_another_plan_of_the_leg_is_refused_at_once() -> None:
    net = Net()
    p, d = net.pair()
    wrong: list[Message] = []
    net.stop = lambda _, message: isinstance(message, GrantMessage) and not wrong.append(message)
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    (grant,) = wrong
    assert isinstance(grant, GrantMessage)
    p.hear(d, evolve(grant, plan="another"))
    net.flow()
    assert (p.outcome().reason, d.outcome().reason) == (Reason.LAYOUT, Reason.LAYOUT)


def test_r6_other_legs_than_expected_are_refused_at_once() -> None:
    net = Net()
    p, d = reading(net)
    done: list[Message] = []
    net.stop = lambda _, message: isinstance(message, Done) and not done.append(message)
    d.end_ops()
    net.flow()
    (message,) = done
    assert isinstance(message, Done)
    p.hear(d, evolve(message, legs=(0, 1)))
    net.flow()
    assert (p.outcome().reason, d.outcome().reason) == (Reason.LAYOUT, Reason.LAYOUT)


@pytest.mark.parametrize("mode", Mode)
def test_r6_a_rank_that_shares_no_data_waits_for_its_release(mode: Mode) -> None:
    net = Net()
    heads = {"heads": 1}  # replicated: only one of both producer ranks is read
    p0, p1 = (net.node("p", layout(rank, 2, **heads), epoch=5) for rank in (0, 1))
    d = net.node("d", layout(**heads))
    paper = ticket(p0, 1)
    if mode is Mode.PUSH:
        d.put(expose(1))
        for p in (p0, p1):
            p.put(stage(5))
    else:
        for p in (p0, p1):
            p.put(expose(1, mode=mode))
        d.put(stage(5, mode=mode, with_=paper))
    net.flow()
    for node in (p0, p1, d):
        node.end_ops()
    net.flow()
    assert [node.outcome().ok for node in (p0, p1, d)] == [True] * 3
    assert [node.released() for node in (p0, p1, d)] == [1] * 3
    assert sorted(len(node.posts()) for node in ((p0, p1) if mode is Mode.PUSH else (d,))) in ([0, 1], [1])


@pytest.mark.parametrize("mode", Mode)
def test_r6_a_full_prefix_hit_is_one_round_trip(mode: Mode) -> None:
    net = Net()
    p, d = net.pair()
    if mode is Mode.PUSH:
        d.put(expose(first=2, tokens=8))
        p.put(stage(5, 6))
    else:
        p.put(expose(1, 2, mode=mode))
        d.put(stage(first=2, tokens=8, mode=mode, with_=ticket(p, 1, 2)))
    net.flow()
    assert (p.outcome().ok, d.outcome().ok, p.released(), d.released()) == (True, True, 1, 1)
    assert p.posts() + d.posts() == []


def test_r10_blocks_out_of_bounds_are_refused_before_the_first_operation() -> None:
    net = Net()
    p, d = net.pair()
    p.put(expose(1, 2, mode=Mode.PULL))
    forged = ticket(p, 1, 99)
    d.put(stage(8, 9, mode=Mode.PULL, with_=forged))
    net.flow()
    assert (d.outcome().reason, d.posts()) == (Reason.BOUNDS, [])


def test_r10_a_grant_out_of_bounds_is_refused_by_the_writer() -> None:
    net = Net()
    p, d = net.pair()
    grants: list[Message] = []
    net.stop = lambda _, message: isinstance(message, GrantMessage) and not grants.append(message)
    d.put(expose(1))
    p.put(stage(5))
    net.flow()
    (message,) = grants
    assert isinstance(message, GrantMessage)
    wild = evolve(message, grant=evolve(message.grant, blocks=BlockTable.of([99])))
    p.hear(d, wild)
    net.flow()
    assert (p.outcome().reason, p.posts(), d.outcome().reason) == (Reason.BOUNDS, [], Reason.BOUNDS)


def test_r10_prompts_of_different_length_are_refused_with_the_last_part() -> None:
    net = Net()
    p, d = net.pair()
    d.put(expose(1, 2, tokens=8))
    p.put(stage(5, 6, tokens=7))
    net.flow()
    assert (p.outcome().reason, p.posts(), d.outcome().reason) == (Reason.BOUNDS, [], Reason.BOUNDS)
    assert "8" in p.outcome().detail and "7" in p.outcome().detail


@pytest.mark.parametrize("first", ["grant", "part"])
def test_r10_prompts_of_one_length_that_differ_are_refused_before_any_byte(first: str) -> None:
    net = Net()
    p, d = net.pair()
    if first == "part":
        p.put(evolve(stage(5, tokens=8, last=False), prompt="aa"))
        net.flow()
    d.put(evolve(expose(1, 2), prompt="bb"))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    if first == "grant":
        p.put(evolve(stage(5, tokens=8, last=False), prompt="aa"))
        net.flow()
    p.put(evolve(stage(6, first=1, tokens=8), prompt="aa"))
    net.flow()
    assert (p.outcome().reason, p.posts(), d.outcome().reason) == (Reason.PROMPT, [], Reason.PROMPT)
    assert "aa" in d.outcome().detail and "bb" in d.outcome().detail
    assert (p.released(), d.released()) == (1, 1)


@pytest.mark.parametrize(("ours", "theirs"), [("aa", "aa"), ("aa", ""), ("", "bb"), ("", "")])
def test_r10_prompts_are_compared_where_both_sides_give_a_digest(ours: str, theirs: str) -> None:
    net = Net()
    p, d = net.pair()
    d.put(evolve(expose(1, 2), prompt=theirs))
    p.put(evolve(stage(5, 6), prompt=ours))
    net.flow()
    p.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)
    (grant,) = d.sent(GrantMessage)
    assert isinstance(grant, GrantMessage)
    assert (grant.prompt or "") == theirs


def test_r10_caches_that_differ_are_refused_by_name() -> None:
    net = Net()
    _p, d = net.node("p"), net.node("d", layout(model="another"))
    d.put(expose(1))
    net.flow()
    assert d.outcome().reason is Reason.LAYOUT
    assert "another" in d.outcome().detail and "toy" in d.outcome().detail


def test_r10_stages_of_one_pipeline_have_one_fingerprint() -> None:
    """A rank without any layer of a group is of the same model as the others."""
    group = CacheGroup(0, "full", 4, (LayerSpec("a", 0, 0, 16, 16),), 1, 1)
    other = CacheGroup(1, "window", 4, (LayerSpec("b", 0, 256, 16, 16),), 1, 1)
    whole = Layout("toy", "f32", "test", (group, other), 16)
    stages = (("a",), ("b",))
    one = evolve(whole, groups=(group, evolve(other, layers=())), pp_size=2, stages=stages)
    two = evolve(whole, groups=(evolve(group, layers=()), other), pp_size=2, pp_rank=1, stages=stages)
    assert one.fingerprint() == two.fingerprint() == whole.fingerprint()


def test_r10_a_reader_may_begin_in_the_middle_of_a_larger_block() -> None:
    net = Net(integrity=True)
    p, d = net.node("p", layout(block_size=8)), net.node("d")
    p.put(Expose("t", Mode.PULL, BlockTable.of([1, 2]), (0,), 16, LEASE))
    paper = ticket(p, 1, 2, tokens=16)
    d.put(Stage("t", Mode.PULL, part(7, 8, 9, first=1), True, 16, paper))
    net.flow()
    d.end_ops()
    net.flow()
    assert (p.outcome().ok, d.outcome().ok) == (True, True)
    digests = [action for node in (p, d) for action in node.actions if type(action).__name__ == "Digest"]
    keys = [sorted(key for _, ks in action.units for key in ks.tolist()) for action in digests]  # type: ignore[union-attr]
    assert len(keys) == 2 and keys[0] == keys[1]


@pytest.mark.parametrize("first", [(3,), (2**40,), (0, 0), ()])
def test_r10_a_reader_cannot_have_read_from_behind_its_prompt(first: tuple[int, ...]) -> None:
    net = Net()
    p, d = reading(net)  # two blocks: (2,) would say that nothing was read
    done: list[Message] = []
    net.stop = lambda _, message: isinstance(message, Done) and not done.append(message)
    d.end_ops()
    net.flow()
    (message,) = done
    assert isinstance(message, Done)
    p.hear(d, evolve(message, first=first))
    net.flow()
    assert (p.outcome().reason, d.outcome().reason) == (Reason.BOUNDS, Reason.BOUNDS)


@pytest.mark.parametrize("mode", Mode)
def test_r13_bytes_are_right_or_the_transfer_fails(mode: Mode) -> None:
    net = Net(integrity=True)
    p, d = writing(net) if mode is Mode.PUSH else reading(net)
    d.digest = "another"
    p.end_ops()
    d.end_ops()
    net.flow()
    assert (p.outcome().reason, d.outcome().reason) == (Reason.INTEGRITY, Reason.INTEGRITY)
    assert (p.released(), d.released()) == (1, 1)


def test_r13_done_waits_for_its_digest() -> None:
    net = Net(integrity=True)
    p, d = net.pair()
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    p.digest = ""  # the sum takes its time
    p.put(stage(5))
    p.end_ops()
    net.advance(LEASE / 2)
    assert p.sent(Done) == []


def test_r14_a_repeated_grant_is_not_answered_stopped_while_bytes_may_land() -> None:
    net = Net(most=1)
    p, d = writing(net)
    first, second = p.posts()
    p.put(OpFailed(first.op_id))
    (grant,) = d.sent(GrantMessage)
    p.hear(d, grant)
    net.flow()
    assert (p.sent(Stopped), d.news, p.states()) == ([], [], ["draining"])
    p.put(OpDone(second.op_id, 1))
    p.hear(d, grant)
    net.flow()
    assert (d.outcome().reason, d.released(), len(p.sent(Stopped))) == (Reason.TRANSPORT, 1, 2)


@pytest.mark.parametrize("ok", [True, False])
def test_r14_done_and_stopped_wait_for_every_operation(ok: bool) -> None:
    net = Net(most=1)
    p, d = writing(net)
    first, second = p.posts()
    p.put(OpDone(first.op_id, 1) if ok else OpFailed(first.op_id))
    net.flow()
    assert (p.sent(Done), p.sent(Stopped), d.outcomes()) == ([], [], [])
    p.put(OpDone(second.op_id, 1))
    net.flow()
    assert (p.outcome().ok, d.outcome().ok, d.released()) == (ok, ok, 1)
