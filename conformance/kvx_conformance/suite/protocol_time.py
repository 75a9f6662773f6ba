"""Cases of the sentences on leases and other clocks: TIM. They wait for real time, as little of it as they can."""

from __future__ import annotations

import time
from typing import Any

from kvx.core.messages import Renew, Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.encounter import Encounter, Facing, Step
from kvx_conformance.suite.subject import Feature

WRITE = (Feature.WRITE,)
_LEASE_S = 0.8


def _short(context: Context, **more: float) -> Encounter:
    """Leases of 0.8 s, and keepalives that go with them."""
    bounds = {"lease_s": _LEASE_S, "lost_s": 0.5, "keepalive_s": 0.2, **more}
    options: dict[str, Any] = {name: seconds * context.pace for name, seconds in bounds.items()}
    return Encounter(context, **options)


def _exposed(encounter: Encounter, transfer: str, mode: Mode) -> Facing:
    """The instance's blocks are out under the short lease, and its peer has the grant."""
    facing = encounter.facing(transfer, mode, Side.TARGET)
    facing.lease_s = _LEASE_S * encounter.context.pace
    return facing.to(Step.EXPOSED)


@case(
    "KVX-TIM-001",
    "ends",
    "A grant and a ticket are out and nobody renews them: the transfer fails with `lease_ended` one lease after its "
    "receipt, and not before.",
)
def ends(context: Context) -> None:
    encounter = _short(context)
    for mode in encounter.modes():
        began = time.monotonic()
        facing = _exposed(encounter, mode.value, mode)
        if mode is Mode.PUSH:
            facing.line.hear(Revoke, facing.transfer)
            facing.line.say(Stopped(facing.transfer, Reason.LEASE_ENDED))
        encounter.fails(facing.transfer, Reason.LEASE_ENDED, limit_s=4 * _LEASE_S)
        took = time.monotonic() - began
        context.check(took >= 0.8 * _LEASE_S * context.pace, f"a lease of {_LEASE_S} s ends after {took:.2f} s")
    encounter.until(lambda: not encounter.toy.kept(), "all blocks are released")
    encounter.intact()


@case(
    "KVX-TIM-001",
    "counted-anew",
    "The initiator renews for twice the lease: the transfer stays open that long, and ends well.",
    profile=Profile.RESILIENCE,
)
def counted_anew(context: Context) -> None:
    encounter = _short(context)
    for mode in encounter.modes():
        facing = _exposed(encounter, mode.value, mode)
        until = time.monotonic() + 2 * _LEASE_S * context.pace
        while time.monotonic() < until:
            facing.line.say(Renew((facing.transfer,)))
            encounter.linger(0.1 * context.pace)
        context.check(not encounter.toy.outcomes(facing.transfer), "a lease ends although it was renewed")
        facing.well()
    encounter.intact()


@case(
    "KVX-TIM-002",
    "each-third",
    "An initiator holds a grant for two leases: it renews at least each third of the lease.",
)
def each_third(context: Context) -> None:
    encounter = Encounter(context)
    for mode in encounter.modes():
        facing = encounter.facing(mode.value, mode, Side.INITIATOR)
        facing.lease_s = 0.6 * context.pace
        facing.to(Step.GRANTED)
        before = len(facing.line.said(Renew, facing.transfer))
        encounter.linger(1.2 * context.pace)
        renewed = len(facing.line.said(Renew, facing.transfer)) - before
        context.check(renewed >= 4, f"{renewed} renewals in two leases; six are due")
        facing.well()
    encounter.over()


@case(
    "KVX-TIM-005",
    "patience",
    "An initiator renews its grant, and its engine never has blocks: it fails with `patience` all the same.",
)
def patience(context: Context) -> None:
    encounter = Encounter(context, patience_s=0.7 * context.pace)
    for mode in encounter.modes():
        facing = encounter.facing(mode.value, mode, Side.INITIATOR)
        facing.lease_s = 0.4 * context.pace
        facing.to(Step.GRANTED)
        encounter.fails(facing.transfer, Reason.PATIENCE, released=False)
        facing.line.hear(Stopped, facing.transfer)
    encounter.intact()


@case(
    "KVX-TIM-005",
    "transfer-max",
    "A peer renews for ever: the target fails with `overdue` after `transfer_max_s`.",
)
def transfer_max(context: Context) -> None:
    encounter = Encounter(context, transfer_max_s=0.7 * context.pace)
    for mode in encounter.modes():
        facing = encounter.facing(mode.value, mode, Side.TARGET).to(Step.EXPOSED)
        until = time.monotonic() + 4 * context.pace
        while not encounter.toy.outcomes(facing.transfer) and time.monotonic() < until:
            facing.line.say(Renew((facing.transfer,)))
            encounter.linger(0.05 * context.pace)
        encounter.fails(facing.transfer, Reason.OVERDUE, released=False)
        facing.line.say(Stopped(facing.transfer, Reason.OVERDUE))
        encounter.until(lambda facing=facing: encounter.toy.released(facing.transfer), "its blocks are released")  # type: ignore[misc]
    encounter.intact()


@case(
    "KVX-TIM-006",
    "silent-but-alive",
    "The peer answers keepalives and nothing else from every step on: the transfer is told to have failed in bounded "
    "time.",
)
def silent(context: Context) -> None:
    bounds = dict.fromkeys(("patience_s", "part_gap_s", "op_timeout_s", "ack_wait_s"), 0.8)
    encounter = _short(context, **bounds, grace_s=0.5, drain_limit_s=0.2)
    for mode, side in encounter.roles():
        waiting = list[Facing]()
        for step in (Step.EXPOSED, Step.GRANTED, Step.MOVING, Step.SETTLING):
            if side is Side.TARGET and step is Step.SETTLING:
                continue
            facing = encounter.facing(f"{mode.value}-{side.value}-{step.value}", mode, side)
            facing.lease_s = _LEASE_S * context.pace
            waiting.append(facing.to(step))
        for facing in waiting:
            encounter.fails(facing.transfer, limit_s=5.0, released=False)
            facing.hand_over()
            if facing.bound:
                facing.line.say(Stopped(facing.transfer, Reason.OVERDUE))
        encounter.until(lambda: not encounter.toy.kept(), "all blocks are released")
    encounter.intact()


@case(
    "KVX-TIM-007",
    "queueing",
    "A consumer has no blocks yet and says Renew: the producer waits for its grant longer than `patience_s`.",
    needs=WRITE,
)
def queueing(context: Context) -> None:
    encounter = Encounter(context, patience_s=0.6 * context.pace)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR).to(Step.EXPOSED)
    until = time.monotonic() + 1.4 * context.pace
    while time.monotonic() < until:
        facing.line.say(Renew(("t",)))
        encounter.linger(0.1 * context.pace)
    context.check(not encounter.toy.outcomes("t"), "patience ends although the consumer queues")
    facing.well()
    encounter.intact()


@case(
    "KVX-TIM-008",
    "rests",
    "Nothing is open and nothing comes: the instance takes next to no processor time.",
)
def rests(context: Context) -> None:
    encounter = Encounter(context)
    encounter.serves()
    encounter.peers[-1].lines[-1].barrier()
    used, began = time.process_time(), time.monotonic()
    time.sleep(0.4 * context.pace)
    share = (time.process_time() - used) / (time.monotonic() - began)
    context.check(share < 0.1, f"an instance at rest takes {share:.0%} of a processor")
    encounter.over()
