"""Each class of failure, driven to its bound on a virtual clock: both engines know by then, whatever the options."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvx.config import BOUNDS, Options, bounds
from kvx.core.events import Abort, Claim, PeerLost
from kvx.core.legs import Limits
from kvx.core.messages import Ack, GrantMessage
from kvx.core.model import Access, Mode
from kvx_conformance import scenes
from kvx_conformance.pair import Net, Node, ticket
from kvx_conformance.scenes import expose, stage, writing

TIMES = [field.name for field in attrs.fields(Limits) if field.name.endswith("_s")]


def nobody_answers(net: Net) -> list[Node]:
    _p, d = net.pair()
    net.silent.add("p:0")
    d.put(expose(1))
    return [d]


def no_grant(net: Net) -> list[Node]:
    p, _d = net.pair()
    p.put(stage(5))
    return [p]


def no_blocks(net: Net) -> list[Node]:
    p, d = net.pair()
    d.put(expose(1))
    p.put(Claim("t", Mode.PUSH))
    return [p, d]


def never_reaches_the_producer(net: Net) -> list[Node]:
    _p, d = net.pair()
    d.put(expose(1))
    return [d]


def reading(net: Net) -> tuple[Node, Node]:
    """As `scenes.reading`, with the lease that the options give."""
    p, d = net.pair()
    p.put(expose(1, 2, mode=Mode.PULL))
    d.put(stage(8, 9, mode=Mode.PULL, with_=ticket(p, 1, 2, lease_s=net.limits.lease_s)))
    net.flow()
    return p, d


def no_reader(net: Net) -> list[Node]:
    p = net.node("p")
    p.put(expose(1, 2, mode=Mode.PULL))
    return [p]


def dead_reader(net: Net) -> list[Node]:
    p, d = reading(net)
    net.kill(d)
    return [p]


def no_further_part(net: Net) -> list[Node]:
    p, d = net.pair()
    d.put(expose(1, 2))
    p.put(stage(5, tokens=8, last=False))
    net.flow()
    p.end_ops()
    return [p, d]


def hung_write(net: Net) -> list[Node]:
    return list(writing(net))


def hung_read(net: Net) -> list[Node]:
    return list(reading(net))


def dead_writer(net: Net) -> list[Node]:
    p, d = writing(net)
    net.kill(p)
    return [d]


def dead_target(net: Net) -> list[Node]:
    p, d = writing(net)
    net.kill(d)
    return [p]


def dead_owner(net: Net) -> list[Node]:
    p, d = reading(net)
    net.kill(p)
    return [d]


def silent_writer(net: Net) -> list[Node]:
    _p, d = writing(net)
    net.silent.add("p:0")
    return [d]


def silent_target(net: Net) -> list[Node]:
    p, _d = writing(net)
    net.silent.add("d:0")
    return [p]


def cut_for_good(net: Net) -> list[Node]:
    p, d = writing(net)
    p.cut()
    net.silent.add("p:0")
    return [p, d]


def garbage(net: Net) -> list[Node]:
    """Each connection ends as soon as something is said on it, as the control channel ends one for bad bytes."""
    p, d = writing(net)

    def broken(node: Node, message: object) -> bool:
        for number in list(node.links):
            other, theirs = node.links.pop(number)
            other.links.pop(theirs, None)
            other.put(PeerLost(theirs, other.dialled.get(theirs), False, "bad bytes"))
            node.put(PeerLost(number, node.dialled.get(number), False, "closed"))
        return True

    net.stop = broken
    return [p, d]


def refused_facts(net: Net) -> list[Node]:
    p, d = net.pair()
    d.put(expose(1, 2))
    p.put(stage(5, tokens=4))
    return [p, d]


def abort_of_the_target(net: Net) -> list[Node]:
    p, d = writing(net)
    d.put(Abort("t"))
    return [p, d]


def abort_of_the_owner(net: Net) -> list[Node]:
    """The reader's operations go on to the last moment of its drain."""
    p, d = reading(net)
    p.put(Abort("t"))
    net.flow()
    return late_end(net, p, d, d)


def abort_of_the_writer(net: Net) -> list[Node]:
    p, d = writing(net)
    p.put(Abort("t"))
    return late_end(net, p, d, p)


def late_end(net: Net, p: Node, d: Node, initiator: Node) -> list[Node]:
    net.advance(net.limits.drain_limit_s * 0.99)
    initiator.end_ops(ok=False)
    return [p, d]


def hung_abort_of_the_writer(net: Net) -> list[Node]:
    p, d = writing(net)
    p.put(Abort("t"))
    return [p, d]


def hung_abort_of_the_reader(net: Net) -> list[Node]:
    p, d = reading(net)
    d.put(Abort("t"))
    return [p, d]


def no_ack(net: Net) -> list[Node]:
    p, d = writing(net)
    net.stop = lambda _, message: isinstance(message, Ack)
    p.end_ops()
    return [p, d]


def too_slow(net: Net) -> list[Node]:
    """Operations end in time, parts come in time, and it takes for ever all the same."""
    p, d = net.pair()
    d.put(expose(*range(16)))
    net.flow()
    pause = net.limits.part_gap_s * 0.9
    for n in range(16):
        if p.outcomes():
            break
        p.put(stage(n, first=n, tokens=64, last=False))
        net.advance(0.1)
        p.end_ops()
        net.advance(pause)
    return [p, d]


SCENES: dict[str, list[Callable[[Net], list[Node]]]] = {
    "nobody answers at the peer's address": [nobody_answers],
    "the peer's blocks or grant never come": [no_grant, no_blocks],
    "a push whose request never reaches the producer": [never_reaches_the_producer],
    "the reader of a ticket dies or never comes": [no_reader, dead_reader],
    "the producer stops between two parts": [no_further_part],
    "an operation hangs": [hung_write, hung_read],
    "the peer dies or stops in mid-transfer": [dead_writer, dead_target, dead_owner, silent_writer, silent_target],
    "the link is cut, or carries what is no message, and stays so": [cut_for_good, garbage],
    "a message is refused: other facts, other blocks, out of bounds": [refused_facts],
    "an abort": [abort_of_the_target, abort_of_the_writer, abort_of_the_owner],
    "an abort of an initiator whose operations do not end": [hung_abort_of_the_writer, hung_abort_of_the_reader],
    "the answer to Done is lost": [no_ack],
    "a transfer is alive and too slow": [too_slow],
}
CASES = [(failure, scene) for failure, scenes in SCENES.items() for scene in scenes]
AT_ONCE = {"refused_facts", "dead_writer", "dead_target", "dead_owner"}


def halved() -> Options:
    return attrs.evolve(Options(), **{name: getattr(Options(), name) / 2 for name in TIMES})


def limits(options: Options) -> Limits:
    return Limits(**{name: getattr(options, name) for name in TIMES})


def taken(scene: Callable[[Net], list[Node]], options: Options, access: Access, most: float) -> float:
    """Seconds from the failure, which each scene sets at once, until the last engine knows."""
    net = Net(access=access, limits=limits(options))
    began = net.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "LEASE_S", options.lease_s)
        nodes = scene(net)
    net.flow()
    while not all(node.outcomes() for node in nodes) and net.now < began + most:
        net.advance(min(0.05, began + most - net.now) or 0.05)
    assert all(len(node.outcomes()) == 1 for node in nodes), [node.states() for node in nodes]
    return net.now - began


def test_every_class_of_failure_is_driven_to_its_bound() -> None:
    assert SCENES.keys() == BOUNDS.keys()


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize(("failure", "scene"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_both_engines_know_within_the_bound(failure: str, scene: Callable[[Net], list[Node]], access: Access) -> None:
    options, half = Options(), halved()
    bound, smaller = bounds(options)[failure], bounds(half)[failure]
    assert smaller == bound / 2
    whole = taken(scene, options, access, bound)
    short = taken(scene, half, access, smaller)
    if scene.__name__ not in AT_ONCE:
        assert whole >= bound / 5, "a bound that nothing comes near to says nothing"
        assert short == pytest.approx(whole / 2, rel=0.15)


@pytest.mark.parametrize("name", sorted({name for names in BOUNDS.values() for name in names}))
def test_each_option_of_a_formula_counts(name: str) -> None:
    for failure, names in BOUNDS.items():
        more = bounds(attrs.evolve(Options(), **{name: getattr(Options(), name) + 1}))[failure]
        assert more == bounds(Options())[failure] + names.count(name)


def test_a_grant_is_no_longer_good_when_its_bound_is_over() -> None:
    net = Net()
    p, d = net.pair()
    net.stop = lambda _, message: isinstance(message, GrantMessage)
    d.put(expose(1))
    net.advance(bounds(Options())["a push whose request never reaches the producer"])
    assert not d.outcome().ok
    net.stop = lambda _, message: False
    p.put(stage(5))
    net.advance(1)
    assert p.posts() == []
