"""Every message may come twice, at once or after others of its connection: nothing happens twice (R3, R9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvx.core.events import Abort
from kvx.core.legs import Limits
from kvx.core.messages import Ack, GrantMessage, Message, Stopped
from kvx.core.model import Mode, Reason
from kvx_conformance.pair import Net, Node, ticket
from kvx_conformance.scenes import expose, stage, two_on_one

Steps = Sequence[Callable[[Node, Node], object]]

PUSH: Steps = (
    lambda _, d: d.put(expose(1, 2)),
    lambda p, _: p.put(stage(6, last=False, tokens=8)),
    lambda p, _: p.end_ops(),
    lambda p, _: p.put(stage(7, first=1, tokens=8)),
    lambda p, _: p.end_ops(),
)
PULL: Steps = (
    lambda p, _: p.put(expose(1, 2, mode=Mode.PULL)),
    lambda p, d: d.put(stage(8, 9, mode=Mode.PULL, with_=ticket(p, 1, 2))),
    lambda _, d: d.end_ops(),
)
ABORT: Steps = (
    lambda _, d: d.put(expose(1)),
    lambda p, _: p.put(stage(6)),
    lambda _, d: d.put(Abort("t", Reason.ABORTED)),
    lambda p, _: p.end_ops(ok=False),
)


def _live(steps: Steps, repeat: str, *, integrity: bool) -> tuple[Node, Node]:
    net = Net(integrity=integrity)
    p, d = net.pair()
    heard: list[tuple[Node, Node, Message]] = []

    def again(sender: Node, message: Message) -> bool:
        receiver = d if sender is p else p
        if repeat == "at once":
            receiver.hear(sender, message)
        elif repeat == "later":
            heard.append((receiver, sender, message))
        return False

    net.stop = again
    for step in steps:
        step(p, d)
        net.flow()
        for receiver, sender, message in tuple(heard):
            receiver.hear(sender, message)
        net.flow()
    return p, d


@pytest.mark.parametrize("integrity", [False, True])
@pytest.mark.parametrize("repeat", ["at once", "later"])
@pytest.mark.parametrize("steps", [PUSH, PULL, ABORT], ids=["push", "pull", "abort"])
def test_r9_a_message_that_comes_twice_changes_nothing(steps: Steps, repeat: str, integrity: bool) -> None:
    once = _live(steps, "never", integrity=integrity)
    twice = _live(steps, repeat, integrity=integrity)
    for calm, node in zip(once, twice, strict=True):
        assert node.news == calm.news
        assert [post.local.pieces() for post in node.posts()] == [post.local.pieces() for post in calm.posts()]
        assert len(node.permits()) == len(calm.permits())
        for name in ("open", "peers", "counts"):
            assert node.endpoint.snapshot()[name] == calm.endpoint.snapshot()[name]
    assert once[1].outcome().ok == (steps is not ABORT)


def test_r9_an_ack_that_comes_twice_changes_nothing_while_another_leg_is_open() -> None:
    net = Net()
    first, second, d = two_on_one(net)
    for p in (first, second):
        p.put(expose(1, 2, mode=Mode.PULL))
    d.put(stage(8, 9, mode=Mode.PULL, with_=ticket(first, 1, 2)))
    net.flow()
    net.stop = lambda node, message: node is second and isinstance(message, Ack)
    d.end_ops()
    net.flow()
    assert d.states() == ["done", "settling"]
    link = next(number for number, (peer, _) in d.links.items() if peer is first)
    assert d.hear(first, Ack("t", True), link=link) == []
    assert d.hear(first, Ack("t", False, Reason.OTHER), link=link) == []
    assert (d.states(), d.outcomes()) == (["done", "settling"], [])


def test_r9_a_grant_that_was_refused_for_lack_of_room_stays_refused() -> None:
    """Found by the simulation (seed 103239): the grant came a second time when there was room, and bytes were written
    into blocks that Stopped had set free."""
    net = Net(limits=Limits(transfers=1))
    p, d = net.pair()
    d.put(expose(1, transfer="first"))
    net.flow()
    grants: list[Message] = []
    net.stop = lambda node, message: isinstance(message, GrantMessage) and bool(grants.append(message))
    other = net.node("e")
    other.put(expose(2, 3))
    net.flow()
    assert [stopped.reason for stopped in p.sent(Stopped) if isinstance(stopped, Stopped)] == [Reason.NO_CAPACITY]
    assert (other.outcome().reason, other.released()) == (Reason.NO_CAPACITY, 1)
    p.put(stage(5, transfer="first"))
    p.end_ops()
    net.flow()
    p.put(stage(6, 7))
    p.hear(other, grants[-1])
    net.flow()
    assert [post for post in p.posts() if post.stamp.transfer == "t"] == []
    assert (p.outcome().reason, p.released()) == (Reason.NO_CAPACITY, 1)


def test_r7_a_grant_for_what_was_refused_to_the_engine_brings_no_second_outcome() -> None:
    """Found by the simulation (seed 104314)."""
    net = Net(limits=Limits(transfers=1))
    p, d = net.pair()
    p.put(stage(5, transfer="first"))
    p.put(stage(6, last=False, tokens=8))
    assert p.outcome().reason is Reason.NO_CAPACITY
    d.put(expose(1, 2))
    net.flow()
    assert d.outcome().reason is Reason.NO_CAPACITY
    p.put(stage(7, first=1, tokens=8))
    assert p.outcome().reason is Reason.NO_CAPACITY  # there is exactly one
    assert p.released() == 1
