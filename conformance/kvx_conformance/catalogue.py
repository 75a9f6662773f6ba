"""The scenarios. Ids are stable; `hazards` names entries of the catalogue of known faults.

`p` is the producer and `d` the consumer unless a title says otherwise. DEEP is a byte in the
middle of a transfer's payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvx.core.model import Mode, Reason
from kvx_conformance.actor import LAYERS, Call, Shape
from kvx_conformance.scenarios import (
    Act,
    Break,
    Expect,
    Fired,
    Garbage,
    Heal,
    Plane,
    Scenario,
    Signal,
    Start,
    Step,
    Wait,
)

PUSH, PULL = Mode.PUSH, Mode.PULL
DEEP = 40_000
SECRET = "a secret of all instances in these scenarios"  # noqa: S105 - it guards nothing

R = Reason
LOST = frozenset({R.PEER_LOST, R.TRANSPORT})
"""Both the control channel and the transport see a process die; the first to say so names the reason."""


def expose(transfer: str = "t", mode: Mode = PUSH, producer: str = "p", consumer: str = "d", **more: Any) -> Call:
    """The target's call."""
    return Call(consumer if mode is PUSH else producer, "expose", transfer, mode, producer, **more)


def stage(transfer: str = "t", mode: Mode = PUSH, producer: str = "p", consumer: str = "d", **more: Any) -> Call:
    """The initiator's call."""
    return Call(producer if mode is PUSH else consumer, "stage", transfer, mode, producer, **more)


def claim(who: str, transfer: str = "t", mode: Mode = PUSH) -> Call:
    return Call(who, "claim", transfer, mode)


def abort(who: str, transfer: str = "t", mode: Mode = PUSH, reason: Reason = R.ABORTED) -> Call:
    return Call(who, "abort", transfer, mode, reason=reason)


def ok(*who: str, transfer: str = "t") -> tuple[Step, ...]:
    return tuple(Expect(one, transfer=transfer) for one in who or ("p", "d"))


def failed(who: str, *reasons: Reason, transfer: str = "t", released: bool = True) -> Expect:
    return Expect(who, frozenset(reasons), transfer, released)


def moved(transfer: str, mode: Mode, **more: Any) -> tuple[Step, ...]:
    """A transfer that nothing disturbs."""
    return expose(transfer, mode, content=11, **more), stage(transfer, mode, content=11, **more), *ok(transfer=transfer)


def half_way(mode: Mode) -> tuple[Step, ...]:
    """A transfer whose payload stands still in the middle."""
    return Break(Plane.DATA, "p", DEEP, Act.HOLD), expose(mode=mode), stage(mode=mode), Fired()


def struck(act: Act, sender: str, kind: str, mode: Mode) -> tuple[Step, ...]:
    """A transfer that a fault of the control plane meets at one kind of message."""
    return Break(Plane.CONTROL, sender, kind, act), expose(mode=mode), stage(mode=mode), Fired()


def shapes(p: Shape, d: Shape) -> Mapping[str, Shape]:
    return {"p": p, "d": d}


NEXT_PUSH, NEXT_PULL = moved("next", PUSH), moved("next", PULL)
"""What must still work: the blocks that were freed last are used first."""

MOVES = (
    Scenario("KVX-MOV-001", "push", (*moved("t", PUSH), *moved("u", PUSH)), ("J1",)),
    Scenario("KVX-MOV-002", "pull", (*moved("t", PULL), *moved("u", PULL)), ("J1",)),
    Scenario(
        "KVX-MOV-003",
        "push by layers: a layer leaves after it is computed",
        (
            expose(),
            stage(layers=LAYERS[:1], last=False),
            Wait("p", "moving"),
            stage(layers=LAYERS[1:2], last=False),
            stage(layers=LAYERS[2:]),
            *ok(),
        ),
        ("I4",),
    ),
    Scenario(
        "KVX-MOV-004",
        "push by chunks of the prompt: a chunk leaves after it is computed",
        (
            expose(),
            stage(stop=512, last=False),
            Wait("p", "moving"),
            stage(start=512, stop=1536, last=False),
            stage(start=1536),
            *ok(),
        ),
        ("I4",),
    ),
    Scenario(
        "KVX-MOV-005",
        "pull of what a prefix hit left over",
        (expose(mode=PULL), stage(mode=PULL, start=768), *ok()),
        ("H2",),
    ),
    Scenario("KVX-MOV-006", "push of what a prefix hit left over", (expose(start=768), stage(), *ok()), ("H2",)),
    Scenario(
        "KVX-MOV-007",
        "pull with a full prefix hit releases the producer",
        (expose(mode=PULL), stage(mode=PULL, start=2048), *ok()),
        ("H1",),
    ),
    Scenario(
        "KVX-MOV-008",
        "push with a full prefix hit releases the producer",
        (expose(start=2048), stage(), *ok()),
        ("H1",),
    ),
    Scenario("KVX-MOV-009", "push from two ranks to one", moved("t", PUSH), ("F3",), shapes(Shape(ranks=2), Shape())),
    Scenario("KVX-MOV-010", "pull from one rank by two", moved("t", PULL), ("F3",), shapes(Shape(), Shape(ranks=2))),
    Scenario(
        "KVX-MOV-011",
        "push to more ranks than there are heads",
        moved("t", PUSH),
        ("F6",),
        shapes(Shape(heads=1), Shape(ranks=2, heads=1)),
    ),
    Scenario(
        "KVX-MOV-012", "pull into smaller blocks", moved("t", PULL), ("F9",), shapes(Shape(), Shape(block_size=128))
    ),
    Scenario(
        "KVX-MOV-013",
        "the second turn moves the other way",
        (
            *moved("t", PUSH),
            expose("back", producer="d", consumer="p"),
            stage("back", producer="d", consumer="p"),
            *ok(transfer="back"),
        ),
    ),
    Scenario(
        "KVX-MOV-014",
        "no completion before the bytes: one of two connections stands still",
        (
            Break(Plane.DATA, "p", DEEP, Act.LANE),
            expose(),
            stage(),
            Fired(),
            *moved("u", PULL),
            Heal(),
            *ok(),
        ),
        ("J2",),
    ),
    Scenario(
        "KVX-MOV-015",
        "push through a slow network",
        (Break(Plane.DATA, "p", DEEP, Act.DELAY), *moved("t", PUSH)),
        ("J2",),
    ),
    Scenario(
        "KVX-MOV-016", "the grant is slow", (Break(Plane.CONTROL, "d", "GrantMessage", Act.DELAY), *moved("t", PUSH))
    ),
)

ABORTS = (
    Scenario(
        "KVX-ABT-001",
        "the consumer aborts in mid-write: its blocks are reused, no late byte lands",
        (
            *half_way(PUSH),
            abort("d"),
            failed("d", R.ABORTED),
            expose("next", content=11),
            Heal(),
            failed("p", R.ABORTED),
            stage("next", content=11),
            *ok(transfer="next"),
        ),
        ("A1", "B1"),
    ),
    Scenario(
        "KVX-ABT-002",
        "the same where nothing can forbid: quarantine until the writer has stopped",
        (
            *half_way(PUSH),
            abort("d"),
            failed("d", R.ABORTED, released=False),
            Heal(),
            failed("d", R.ABORTED),
            failed("p", R.ABORTED),
            *NEXT_PUSH,
        ),
        ("A1", "B1"),
        region_access=True,
    ),
    Scenario(
        "KVX-ABT-003",
        "the producer is preempted in mid-write",
        (
            *half_way(PUSH),
            abort("p", reason=R.PREEMPTED),
            Heal(),
            failed("p", R.PREEMPTED),
            failed("d", R.PREEMPTED),
            *NEXT_PUSH,
        ),
    ),
    Scenario(
        "KVX-ABT-004",
        "the consumer aborts in mid-read: the producer is released at once",
        (*half_way(PULL), abort("d", mode=PULL), failed("d", R.ABORTED), failed("p", R.ABORTED), Heal(), *NEXT_PULL),
    ),
    Scenario(
        "KVX-ABT-005",
        "the producer aborts in mid-read: the bytes are not used",
        (*half_way(PULL), abort("p", mode=PULL), failed("p", R.ABORTED), failed("d", R.ABORTED), Heal(), *NEXT_PULL),
    ),
    Scenario(
        "KVX-ABT-006",
        "refused before admission: the producer is released in one round trip",
        (expose(mode=PULL), abort("d", mode=PULL), failed("p", R.ABORTED), *NEXT_PULL),
        ("A5",),
    ),
    Scenario(
        "KVX-ABT-007",
        "an abort overtakes the producer's blocks",
        (
            claim("p"),
            expose(),
            Wait("p", "granted"),
            abort("d"),
            failed("d", R.ABORTED),
            Wait("p", "rest"),
            stage(),
            failed("p", R.ABORTED),
            *NEXT_PUSH,
        ),
        ("A3",),
    ),
    Scenario(
        "KVX-ABT-008",
        "an abort crosses Done",
        (
            *struck(Act.HOLD, "p", "Done", PUSH),
            abort("d"),
            failed("d", R.ABORTED),
            Heal(),
            failed("p", R.ABORTED),
            *NEXT_PUSH,
        ),
        ("A2",),
    ),
    Scenario(
        "KVX-ABT-009",
        "one of two transfers is aborted, the other one is not disturbed",
        (
            *half_way(PUSH),
            expose("u", content=9),
            stage("u", content=9),
            abort("d"),
            Heal(),
            failed("d", R.ABORTED),
            failed("p", R.ABORTED),
            *ok(transfer="u"),
        ),
        ("C2",),
    ),
    Scenario(
        "KVX-ABT-010",
        "Stopped is lost although the producer has forgotten the request: asked again, answered again",
        (
            *half_way(PUSH),
            Break(Plane.CONTROL, "p", "Stopped", Act.CUT),
            abort("d"),
            Heal(),
            Fired(),
            failed("p", R.ABORTED),
            failed("d", R.ABORTED),
            *NEXT_PUSH,
        ),
        ("B2",),
        region_access=True,
    ),
    Scenario(
        "KVX-ABT-011",
        "both sides abort at once",
        (*half_way(PUSH), abort("d"), abort("p"), Heal(), failed("d", R.ABORTED), failed("p", R.ABORTED), *NEXT_PUSH),
        ("A2",),
    ),
)

CUTS = (
    Scenario("KVX-CUT-001", "control is cut at Grant", (*struck(Act.CUT, "d", "GrantMessage", PUSH), *ok())),
    Scenario("KVX-CUT-002", "control is cut at a push's Done", (*struck(Act.CUT, "p", "Done", PUSH), *ok()), ("C16",)),
    Scenario(
        "KVX-CUT-003",
        "a push's Ack is lost: both sides end, the next request works",
        (*struck(Act.CUT, "d", "Ack", PUSH), *ok("d"), failed("p", R.OVERDUE, R.PEER_LOST), *NEXT_PUSH),
        ("C16",),
    ),
    Scenario(
        "KVX-CUT-004",
        "a pull's Ack is lost: asked again, answered again",
        (*struck(Act.CUT, "p", "Ack", PULL), *ok()),
        ("C16", "A3"),
    ),
    Scenario("KVX-CUT-005", "Grant arrives in half", (*struck(Act.TRUNCATE, "d", "GrantMessage", PUSH), *ok())),
    Scenario(
        "KVX-CUT-006",
        "control is half-closed at a pull's Done",
        (*struck(Act.HALF_CLOSE, "d", "Done", PULL), *ok()),
        ("C16",),
    ),
    Scenario(
        "KVX-CUT-007",
        "a pull's Done arrives twice",
        (*struck(Act.DUPLICATE, "d", "Done", PULL), *ok(), *NEXT_PULL),
        ("A2", "A3"),
    ),
    Scenario(
        "KVX-CUT-008",
        "a push's Done arrives twice",
        (*struck(Act.DUPLICATE, "p", "Done", PUSH), *ok(), *NEXT_PUSH),
        ("A2", "A3"),
    ),
    Scenario(
        "KVX-CUT-009",
        "data is cut in mid-write: the consumer fails before its lease ends, the peer is not blacklisted",
        (
            Break(Plane.DATA, "p", DEEP, Act.CUT),
            expose(),
            stage(),
            Fired(),
            failed("p", R.TRANSPORT),
            failed("d", R.TRANSPORT),
            *NEXT_PUSH,
        ),
        ("C1", "D2"),
    ),
    Scenario(
        "KVX-CUT-010",
        "data is cut in mid-read",
        (
            Break(Plane.DATA, "p", DEEP, Act.CUT),
            expose(mode=PULL),
            stage(mode=PULL),
            Fired(),
            failed("d", R.TRANSPORT),
            failed("p", R.TRANSPORT),
            *NEXT_PULL,
        ),
        ("C1", "D2"),
    ),
    Scenario(
        "KVX-CUT-011",
        "data ends in the middle of a frame, in the second part of a push",
        (
            expose(),
            stage(stop=512, last=False),
            Wait("p", "moving"),
            Break(Plane.DATA, "p", 20_000, Act.TRUNCATE),
            stage(start=512),
            Fired(),
            failed("p", R.TRANSPORT),
            failed("d", R.TRANSPORT),
            *NEXT_PUSH,
        ),
        ("C1",),
    ),
    Scenario(
        "KVX-CUT-012",
        "data is half-closed in mid-write",
        (
            Break(Plane.DATA, "p", DEEP, Act.HALF_CLOSE),
            expose(),
            stage(),
            Fired(),
            failed("p", R.TRANSPORT),
            failed("d", R.TRANSPORT),
            *NEXT_PUSH,
        ),
        ("C1",),
    ),
    Scenario(
        "KVX-CUT-013",
        "a write hangs beyond every bound",
        (
            *half_way(PUSH),
            failed("p", R.OVERDUE, released=False),
            failed("d", R.LEASE_ENDED),
            expose("next", content=11),
            Heal(),
            failed("p", R.OVERDUE),
            stage("next", content=11),
            *ok(transfer="next"),
        ),
        ("C3",),
    ),
    Scenario(
        "KVX-CUT-014",
        "a read hangs beyond every bound",
        (*half_way(PULL), failed("d", R.OVERDUE), failed("p", R.OVERDUE), Heal(), *NEXT_PULL),
        ("C3",),
    ),
    Scenario(
        "KVX-CUT-015",
        "all connections stand still: both sides end on their own",
        (
            Break(Plane.DATA, "p", DEEP, Act.HOLD),
            expose(),
            Wait("p", "offered"),
            Break(Plane.CONTROL, "p", "Renew", Act.HOLD),
            stage(),
            Fired(),
            failed("d", R.PEER_LOST),
            failed("p", R.PEER_LOST, R.OVERDUE, released=False),
            Heal(),
            failed("p", R.PEER_LOST, R.OVERDUE),
            *NEXT_PUSH,
        ),
        ("A1", "C16"),
    ),
    Scenario(
        "KVX-CUT-016",
        "one bit flips in a push",
        (
            Break(Plane.DATA, "p", DEEP, Act.FLIP),
            expose(),
            stage(),
            failed("d", R.INTEGRITY),
            failed("p", R.INTEGRITY),
            *NEXT_PUSH,
        ),
        ("O4",),
        integrity=True,
    ),
    Scenario(
        "KVX-CUT-017",
        "one bit flips in a pull",
        (
            Break(Plane.DATA, "p", DEEP, Act.FLIP),
            expose(mode=PULL),
            stage(mode=PULL),
            failed("d", R.INTEGRITY),
            failed("p", R.INTEGRITY),
            *NEXT_PULL,
        ),
        ("O4",),
        integrity=True,
    ),
    Scenario(
        "KVX-CUT-018",
        "the handshake gets no answer",
        (Break(Plane.CONTROL, "p", "Hello", Act.HOLD), expose(), Fired(), failed("d", R.PEER_LOST), Heal(), *NEXT_PUSH),
        ("C8",),
    ),
    Scenario(
        "KVX-CUT-019",
        "control is cut in the handshake of a pull",
        (
            Break(Plane.CONTROL, "p", "Hello", Act.CUT),
            expose(mode=PULL),
            stage(mode=PULL),
            failed("d", R.PEER_LOST),
            failed("p", R.PEER_LOST, R.LEASE_ENDED),
            *NEXT_PULL,
        ),
        ("C8",),
    ),
)

DEATHS = (
    Scenario(
        "KVX-DIE-001",
        "the producer dies in mid-write and starts again",
        (*half_way(PUSH), Signal("p", "kill"), Heal(), failed("d", *LOST), Start("p"), *NEXT_PUSH),
        ("D1",),
    ),
    Scenario(
        "KVX-DIE-002",
        "the same where nothing can forbid: quarantine until its death is proven",
        (
            *half_way(PUSH),
            Signal("p", "kill"),
            Heal(),
            failed("d", *LOST, released=False),
            Start("p"),
            failed("d", *LOST),
            *NEXT_PUSH,
        ),
        ("D1", "B1"),
        region_access=True,
    ),
    Scenario(
        "KVX-DIE-003",
        "the consumer dies in mid-write and starts again",
        (*half_way(PUSH), Signal("d", "kill"), Heal(), failed("p", *LOST), Start("d"), *NEXT_PUSH),
        ("D1",),
    ),
    Scenario(
        "KVX-DIE-004",
        "the producer dies before its ticket is used",
        (expose(mode=PULL), Signal("p", "kill"), stage(mode=PULL), failed("d", R.PEER_LOST), Start("p"), *NEXT_PULL),
        ("C8",),
    ),
    Scenario(
        "KVX-DIE-005",
        "a ticket of an earlier start is refused, whatever its blocks hold now",
        (
            *moved("u", PULL),
            expose(mode=PULL),
            Signal("p", "kill"),
            Start("p"),
            *NEXT_PULL,
            stage(mode=PULL),
            failed("d", R.EPOCH),
        ),
        ("B6", "D1"),
    ),
    Scenario(
        "KVX-DIE-006",
        "the reader dies in mid-read: the producer is free when the lease ends",
        (*half_way(PULL), Signal("d", "kill"), Heal(), failed("p", R.LEASE_ENDED), Start("d"), *NEXT_PULL),
        ("K1",),
    ),
    Scenario(
        "KVX-DIE-007",
        "the producer dies in mid-read",
        (*half_way(PULL), Signal("p", "kill"), Heal(), failed("d", *LOST), Start("p"), *NEXT_PULL),
        ("D1",),
    ),
    Scenario(
        "KVX-DIE-008",
        "the producer dies after the consumer has everything",
        (*struck(Act.HOLD, "d", "Ack", PUSH), *ok("d"), Signal("p", "kill"), Heal(), Start("p"), *NEXT_PUSH),
        ("C16",),
    ),
    Scenario(
        "KVX-DIE-009",
        "the consumer dies before it says Ack",
        (
            *struck(Act.HOLD, "p", "Done", PUSH),
            Signal("d", "kill"),
            Heal(),
            failed("p", R.PEER_LOST, R.OVERDUE),
            Start("d"),
            *NEXT_PUSH,
        ),
        ("C16",),
    ),
    Scenario(
        "KVX-DIE-010",
        "the producer stands still in mid-write and runs again: its late bytes land nowhere",
        (
            *half_way(PUSH),
            Signal("p", "stop"),
            failed("d", R.PEER_LOST),
            expose("next", content=11),
            Heal(),
            Signal("p", "cont"),
            failed("p", R.PEER_LOST, R.ABORTED, R.OVERDUE, R.LEASE_ENDED),
            stage("next", content=11),
            *ok(transfer="next"),
        ),
        ("B1", "A1"),
    ),
    Scenario(
        "KVX-DIE-011",
        "the reader stands still beyond its lease: it uses nothing",
        (
            *half_way(PULL),
            Signal("d", "stop"),
            failed("p", R.LEASE_ENDED),
            Heal(),
            Signal("d", "cont"),
            failed("d", R.LEASE_ENDED, R.OVERDUE, R.PEER_LOST),
            *NEXT_PULL,
        ),
        ("B9",),
    ),
    Scenario(
        "KVX-DIE-012",
        "the consumer stands still between grant and blocks",
        (
            claim("p"),
            expose(),
            Wait("p", "granted"),
            Signal("d", "stop"),
            failed("p", R.PEER_LOST, R.LEASE_ENDED, released=False),
            Signal("d", "cont"),
            failed("d", R.PEER_LOST, R.LEASE_ENDED),
            *NEXT_PUSH,
        ),
        ("D2",),
    ),
    Scenario(
        "KVX-DIE-013",
        "the producer dies between two parts",
        (
            expose(),
            stage(stop=512, last=False),
            Wait("p", "moving"),
            Signal("p", "kill"),
            failed("d", R.PEER_LOST),
            Start("p"),
            *NEXT_PUSH,
        ),
        ("D1",),
    ),
)

LEASES = (
    Scenario(
        "KVX-LSE-001", "a ticket that nobody uses", (expose(mode=PULL), failed("p", R.LEASE_ENDED), *NEXT_PULL), ("K1",)
    ),
    Scenario(
        "KVX-LSE-002",
        "a claimed ticket waits longer than its lease, beside one with a shorter lease that nobody claims",
        (
            expose(mode=PULL),
            claim("d", mode=PULL),
            expose("u", PULL, lease_s=5.0),
            failed("p", R.LEASE_ENDED, transfer="u"),
            stage(mode=PULL),
            *ok(),
        ),
        ("K1",),
    ),
    Scenario(
        "KVX-LSE-003",
        "a push whose request never reaches the producer",
        (expose(), failed("d", R.LEASE_ENDED), *NEXT_PUSH),
        ("C8",),
    ),
    Scenario(
        "KVX-LSE-004",
        "a read straddles the end of its lease: it is not used",
        (
            expose(mode=PULL),
            Break(Plane.DATA, "p", DEEP, Act.HOLD),
            stage(mode=PULL),
            Fired(),
            Break(Plane.CONTROL, "d", "Renew", Act.HOLD),
            Fired(),
            failed("p", R.LEASE_ENDED),
            Heal(),
            failed("d", R.LEASE_ENDED, R.PEER_LOST, R.OVERDUE),
            *NEXT_PULL,
        ),
        ("B9",),
    ),
    Scenario(
        "KVX-LSE-005",
        "the next part of a push does not come",
        (
            expose(),
            stage(stop=512, last=False),
            failed("p", R.PATIENCE, released=False),
            failed("d", R.PATIENCE),
            stage(start=512),
            failed("p", R.PATIENCE),
            *NEXT_PUSH,
        ),
        ("G3",),
    ),
    Scenario("KVX-LSE-006", "a push without a grant", (stage(), failed("p", R.PATIENCE)), ("C8",)),
)

REFUSALS = (
    Scenario(
        "KVX-REF-001",
        "a used ticket is shown by another reader: refused, no byte moves",
        (*moved("t", PULL), stage(mode=PULL, consumer="e"), failed("e", R.UNKNOWN_TRANSFER)),
        ("B7",),
        {"p": Shape(), "d": Shape(), "e": Shape()},
    ),
    Scenario(
        "KVX-REF-002",
        "two readers of one ticket: the first one has it",
        (
            expose(mode=PULL),
            claim("d", mode=PULL),
            Wait("d", "granted"),
            stage(mode=PULL, consumer="e"),
            failed("e", R.UNKNOWN_TRANSFER),
            stage(mode=PULL),
            *ok(),
        ),
        ("B7",),
        {"p": Shape(), "d": Shape(), "e": Shape()},
    ),
    Scenario(
        "KVX-REF-003",
        "another model: both sides are told",
        (expose(), stage(), failed("d", R.LAYOUT), failed("p", R.LAYOUT, R.PATIENCE)),
        ("C8",),
        shapes(Shape(), Shape(model="other")),
    ),
    Scenario(
        "KVX-REF-004",
        "another secret",
        (expose(mode=PULL), stage(mode=PULL), failed("d", R.AUTH), failed("p", R.LEASE_ENDED)),
        ("C8",),
        secrets={"p": SECRET, "d": SECRET[::-1]},
    ),
    Scenario(
        "KVX-REF-005",
        "the last part lacks a layer: never ready",
        (expose(), stage(layers=LAYERS[:2]), failed("p", R.BOUNDS), failed("d", R.BOUNDS), *NEXT_PUSH),
        ("G3",),
    ),
    Scenario(
        "KVX-REF-006",
        "the prompts differ",
        (expose(), stage(tokens=1990), failed("p", R.BOUNDS), failed("d", R.BOUNDS), *NEXT_PUSH),
        ("G3",),
    ),
    Scenario(
        "KVX-REF-007",
        "drain: the open transfer ends well, a new one is refused",
        (
            expose(mode=PULL),
            Call("p", "drain", lease_s=10.0),
            expose("u", PULL),
            failed("p", R.DRAINING, transfer="u"),
            stage(mode=PULL),
            *ok(),
        ),
    ),
    Scenario(
        "KVX-REF-008",
        "hostile bytes on every socket, before and during a transfer",
        (Garbage("p"), Garbage("d"), *half_way(PUSH), Garbage("p"), Garbage("d"), Heal(), *ok(), *NEXT_PULL),
        ("O1",),
    ),
    Scenario(
        "KVX-REF-009",
        "with a shared secret",
        (*moved("t", PUSH), *moved("u", PULL)),
        ("O1",),
        secrets={"p": SECRET, "d": SECRET},
    ),
)

SCENARIOS: Mapping[str, Scenario] = {
    scenario.id: scenario for scenario in (*MOVES, *ABORTS, *CUTS, *DEATHS, *LEASES, *REFUSALS)
}
