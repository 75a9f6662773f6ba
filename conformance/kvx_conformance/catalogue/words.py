"""Sentences that many scenarios share. DEEP is a byte in the middle of a transfer's payload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvx.core.model import Mode, Reason
from kvx_conformance.actor import Call, Shape
from kvx_conformance.scenarios import Act, Break, Expect, Fired, Plane, Step

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


def later(who: str) -> tuple[Step, ...]:
    """Longer than grace and quarantine: a short lease that nobody takes up ends at this side."""
    clock = expose("clock", PULL, producer=who, content=13, tokens=256, lease_s=2.5)
    return clock, failed(who, R.LEASE_ENDED, transfer="clock")


NEXT_PUSH, NEXT_PULL = moved("next", PUSH), moved("next", PULL)
"""What must still work: the blocks that were freed last are used first."""
