"""Cases of the sentences on moving data, Done and Ack: DAT, ACK."""

from __future__ import annotations

import time

from kvx.core.messages import Ack, Done, Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.suite.case import Context, case
from kvx_conformance.suite.encounter import CUT, Encounter, Step
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.toy_under_test import TOKENS

WRITE, READ = (Feature.WRITE,), (Feature.READ,)
_BEFORE_DONE = (Step.EXPOSED, Step.GRANTED, Step.MOVING)


@case(
    "KVX-DAT-003",
    "stamp",
    "A grant has a generation, and the peer's transport lets in what shows all of its stamp: the bytes come.",
    needs=(*WRITE, Feature.FORBID),
)
def stamp(context: Context) -> None:
    encounter = Encounter(context)
    for generation in (1, 7, 2**31):
        facing = encounter.facing(f"g-{generation}", Mode.PUSH, Side.INITIATOR)
        facing.altered = {"generation": generation}
        facing.well()
    encounter.over()


@case(
    "KVX-DAT-006",
    "after-its-failure",
    "A transfer is revoked between two parts, and its engine hands over the rest: no byte of it moves any more.",
    needs=WRITE,
)
def after_failure(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR).to(Step.MOVING)
    facing.line.say(Revoke("t", Reason.ABORTED))
    facing.line.hear(Stopped, "t")
    facing.hand_over()
    encounter.fails("t", Reason.ABORTED)
    encounter.linger()
    late = facing.mine.groups[0][CUT // 16 :]
    dirty = [block for block in late if not facing.peer.cache.poisoned(block)]
    context.check(not dirty, f"blocks {dirty} were written after the transfer had failed")
    encounter.over()


@case(
    "KVX-DAT-007",
    "early-read",
    "A ticket is faster than its owner's Expose, and the first READs are refused: they are posted again, and the "
    "bytes come.",
    needs=(*READ, Feature.FORBID),
)
def early_read(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PULL, Side.INITIATOR)
    facing.permits = False
    facing.to(Step.GRANTED)
    facing.stage(0, TOKENS)
    encounter.linger(0.1)
    facing.line.barrier()
    context.check(not encounter.toy.told.get("t"), f"an early READ ends its transfer: {encounter.toy.told.get('t')}")
    facing.peer.permit(facing.grant, facing.theirs)
    facing.hear_done()
    facing.step = Step.SETTLING
    facing.well()
    encounter.over()


# --------------------------------------------------------------------- Done and Ack


@case(
    "KVX-ACK-001",
    "not-before",
    "The peer's transport stands still while everything is handed over: Done does not come before the last byte.",
    needs=WRITE,
)
def not_before(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR).to(Step.GRANTED)
    facing.peer.moving = False
    facing.stage(0, TOKENS)
    encounter.linger(0.1)
    early = facing.line.said(Done, "t")
    wrong = facing.peer.cache.flaws(7, (0,), facing.mine, TOKENS) if early else []
    context.check(not wrong, f"Done came before the bytes: {wrong}")
    facing.peer.moving = True
    facing.hear_done()
    facing.step = Step.SETTLING
    facing.well()
    encounter.over()


@case(
    "KVX-ACK-001",
    "a-part-is-missing",
    "Half of a prompt is moved and the engine has more: Done is not said.",
)
def part_is_missing(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.MOVING, sides=(Side.INITIATOR,)):
        facing.line.barrier()
        encounter.linger()
        context.check(not facing.line.said(Done), "Done is said before the last part")
        facing.well()
    encounter.over()


@case(
    "KVX-ACK-002",
    "unasked",
    "Ack(true) comes unasked, before the initiator has said Done, at every step: it does not end the transfer.",
)
def unasked(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*_BEFORE_DONE, sides=(Side.INITIATOR,)):
        facing.line.say(Ack(facing.transfer, True))
        facing.line.barrier()
        encounter.linger()
        context.check(not encounter.toy.outcomes(facing.transfer), "an Ack that nobody asked for ends a transfer")
        facing.well()
    encounter.over()


@case(
    "KVX-ACK-002",
    "waits-for-it",
    "All bytes are there and Ack is late: nothing is told until it comes. Where it is Ack(false), the transfer fails.",
)
def waits_for_ack(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.SETTLING, sides=(Side.INITIATOR,)):
        encounter.linger()
        context.check(not encounter.toy.told.get(facing.transfer), "something is told before Ack")
        facing.well()
        denied = encounter.facing(f"{facing.transfer}-denied", facing.mode, Side.INITIATOR).to(Step.SETTLING)
        denied.line.say(Ack(denied.transfer, False, Reason.LEASE_ENDED, "too late"))
        encounter.fails(denied.transfer, Reason.LEASE_ENDED)
    encounter.over()


@case(
    "KVX-ACK-002",
    "anothers-ack",
    "Another proven peer says Ack(true), Ack(false) and Revoke for a transfer that it has no part in, at every step: "
    "it goes on, and ends by its own peer's word.",
)
def anothers_ack(context: Context) -> None:
    encounter = Encounter(context)
    stranger = encounter.peer("stranger").dial(encounter.toy.info.address).greet()
    for facing in encounter.everywhere(Step.EXPOSED, Step.GRANTED, Step.MOVING, Step.SETTLING, sides=(Side.INITIATOR,)):
        stranger.say(Ack(facing.transfer, True))
        stranger.say(Ack(facing.transfer, False, Reason.ABORTED))
        if facing.bound:
            stranger.say(Revoke(facing.transfer, Reason.ABORTED))
        stranger.barrier()
        context.check(not encounter.toy.outcomes(facing.transfer), "a stranger's word ends a transfer")
        facing.well()
    encounter.over()


@case(
    "KVX-ACK-003",
    "again",
    "Done comes again after it was acknowledged, over the same connection and over the next one: Ack(true) each time."
    " From another peer it is Ack(false), and so is that of a new start of the same one.",
)
def done_again(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.OVER, sides=(Side.TARGET,)):
        facing.say_done()
        context.check(facing.line.hear(Ack, facing.transfer).ok, "the same Done is not acknowledged again")
        facing.line.close()
        facing.line = facing.peer.dial(encounter.toy.info.address).greet()
        facing.say_done()
        context.check(facing.line.hear(Ack, facing.transfer).ok, "the same Done is not acknowledged after a reconnect")
        other = encounter.peer(f"other-{facing.transfer}")
        line = other.dial(encounter.toy.info.address).greet()
        line.say(other.done(facing.transfer, other.learn(line), facing.role))
        context.check(not line.hear(Ack, facing.transfer).ok, "another peer's Done is acknowledged")
        facing.peer.restart()
        facing.line = facing.peer.dial(encounter.toy.info.address).greet()
        facing.say_done()
        context.check(not facing.line.hear(Ack, facing.transfer).ok, "the Done of another start is acknowledged")
    encounter.over()


@case(
    "KVX-ACK-003",
    "failed",
    "Done comes for a transfer that its target has failed: Ack(false).",
)
def done_for_failed(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.MOVING, sides=(Side.TARGET,)):
        facing.abort()
        facing.line.hear(Revoke, facing.transfer)
        facing.say_done()
        context.check(not facing.line.hear(Ack, facing.transfer).ok, "Done of a failed transfer is acknowledged")
        encounter.fails(facing.transfer, Reason.ABORTED)
    encounter.over()


@case(
    "KVX-ACK-004",
    "unheard",
    "Done comes for a transfer never heard of: it is kept for one `grace_s`, and then answered Ack(false).",
)
def done_unheard(context: Context) -> None:
    grace_s = 0.5 * context.pace
    encounter = Encounter(context, grace_s=grace_s, drain_limit_s=0.2 * context.pace)
    peer = encounter.peer()
    line = peer.dial(encounter.toy.info.address).greet()
    facing = encounter.facing("unheard", encounter.modes()[0], Side.TARGET, peer)
    done = peer.done("unheard", peer.learn(line), facing.role)
    began = time.monotonic()
    line.say(done)
    context.check(not line.hear(Ack, "unheard").ok, "Done of a transfer never heard of is acknowledged")
    took = time.monotonic() - began
    context.check(took >= 0.8 * grace_s, f"Done is answered after {took:.2f} s, and its grace is {grace_s:g} s")
    encounter.over()


@case(
    "KVX-ACK-004",
    "a-step-ahead",
    "A reader is faster than its owner's engine, and its Done comes before Expose: it acts when Expose comes.",
    needs=READ,
)
def done_a_step_ahead(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer()
    line = peer.dial(encounter.toy.info.address).greet()
    facing = encounter.facing("t", Mode.PULL, Side.TARGET, peer)
    line.say(peer.done("t", peer.learn(line), facing.role))
    line.barrier()
    encounter.toy.call("expose", "t", Mode.PULL)
    context.check(line.hear(Ack, "t").ok, "the Done that came first is not acknowledged")
    context.check(encounter.outcome("t").ok, "the owner's transfer fails")
    encounter.over()


@case(
    "KVX-ACK-005",
    "no-answer",
    "No Ack comes after Done: the initiator fails with `overdue` after `ack_wait_s`.",
)
def no_ack(context: Context) -> None:
    encounter = Encounter(context, ack_wait_s=0.4 * context.pace)
    for facing in encounter.everywhere(Step.SETTLING, sides=(Side.INITIATOR,)):
        encounter.fails(facing.transfer, Reason.OVERDUE)
    encounter.over()


@case(
    "KVX-ACK-006",
    "digest",
    "Both sides sum up what was moved: Done with another sum is answered Ack(false) with `integrity`, and the "
    "transfer fails on both sides.",
)
def digest(context: Context) -> None:
    encounter = Encounter(context, integrity="crc")
    for facing in encounter.everywhere(Step.MOVING, sides=(Side.TARGET,)):
        facing.carry(CUT, TOKENS)
        facing.say_done(digest="0123456789abcdef")
        ack = facing.line.hear(Ack, facing.transfer)
        context.check((ack.ok, ack.reason) == (False, Reason.INTEGRITY), f"Done with another digest is answered {ack}")
        encounter.fails(facing.transfer, Reason.INTEGRITY)
    for mode in encounter.modes():
        facing = encounter.facing(f"{mode.value}-sums", mode, Side.INITIATOR).to(Step.SETTLING)
        context.check(facing.line.said(Done)[0].digest, "Done has no digest")
        facing.line.say(Ack(facing.transfer, False, Reason.INTEGRITY, "another digest"))
        encounter.fails(facing.transfer, Reason.INTEGRITY)
    encounter.intact()
