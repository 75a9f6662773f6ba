"""Cases of the sentences on epochs, connections and loss: EPO."""

from __future__ import annotations

import time
from itertools import chain

from attrs import evolve

from kvx.core.messages import Ack, Done, GrantMessage, Message, Renew, Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.encounter import Encounter, Facing, Step
from kvx_conformance.suite.protocol_wire import OPEN
from kvx_conformance.suite.subject import Feature


def words(facing: Facing) -> list[Message]:
    """Every message that would end or change this transfer."""
    transfer, grant = facing.transfer, evolve(facing.grant, mode=Mode.PUSH)
    return [
        Ack(transfer, True),
        Ack(transfer, False, Reason.ABORTED),
        Revoke(transfer, Reason.ABORTED),
        Stopped(transfer, Reason.ABORTED),
        facing.peer.done(transfer, facing.theirs, facing.role),
        GrantMessage(grant, (0,), "another plan"),
    ]


@case(
    "KVX-EPO-001",
    "as-given",
    "An instance starts twice, with an epoch each: its Hello names the epoch of that start, and the two differ.",
)
def as_given(context: Context) -> None:
    encounter = Encounter(context, epoch=11)
    epochs = [encounter.peer("first").dial(encounter.toy.info.address).greet().their_epoch]
    encounter.begin(12)
    line = encounter.peer("second").dial(encounter.toy.info.address).greet()
    epochs.append(line.their_epoch)
    context.check(epochs == [11, 12], f"the epochs of two starts are {epochs}; they were given 11 and 12")
    told = [toy.info.epoch for toy in encounter.toys]
    context.check(told == [11, 12], f"`info` tells the epochs {told}; they were given 11 and 12")
    context.check(line.info is not None and line.info.epoch == 12, "the body of Hello names another epoch")
    encounter.over()


@case(
    "KVX-EPO-002",
    "wrong-epochs",
    "Every message that could end a transfer comes with another epoch of the sender, or of the receiver, or with "
    "none, at every step: each is dropped.",
)
def wrong_epochs(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        line = facing.line
        mine, theirs = facing.peer.epoch, line.their_epoch
        for word in words(facing):
            line.say(word, from_epoch=mine ^ 1)
            line.say(word, to_epoch=theirs ^ 1)
            line.say(word, from_epoch=0, to_epoch=0)
        line.barrier()
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-003",
    "restarted",
    "The peer proves another epoch, at every step of a transfer: the transfer ends with reason `epoch`, its blocks "
    "come back, and the new start is served.",
)
def restarted(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        if not facing.bound:
            facing.to(Step.GRANTED)
        facing.peer.restart()
        line = facing.peer.dial(encounter.toy.info.address).greet()
        facing.peer.learn(line)
        facing.hand_over()
        # A leg whose transport has seen its peer's end is not open any more when the new epoch is proven.
        moving = facing.side is Side.INITIATOR and facing.step is Step.MOVING
        earlier = (Reason.PEER_LOST, Reason.TRANSPORT) if moving else ()
        encounter.fails(facing.transfer, Reason.EPOCH, *earlier)
    encounter.over()


@case(
    "KVX-EPO-004",
    "newest",
    "A peer opens a second connection and proves itself: what is said to it comes on that one, also if it asks on the"
    " old one.",
)
def newest(context: Context) -> None:
    encounter = Encounter(context)
    targets = encounter.everywhere(Step.EXPOSED, sides=(Side.TARGET,))
    for facing in chain(targets, encounter.everywhere(Step.GRANTED, sides=(Side.INITIATOR,))):
        old, new = facing.line, facing.peer.dial(encounter.toy.info.address).greet()
        before = old.said(Renew).count(Renew())
        old.say(Renew(echo=True))
        new.hear(Renew)
        context.check(old.said(Renew).count(Renew()) == before, "the answer comes on the older one of two connections")
        facing.line = new
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-005",
    "cut",
    "The connection is cut at every step of a transfer: whoever dialled dials again, and it ends well.",
)
def cut(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        facing.line.close()
        encounter.linger()
        context.check(not encounter.toy.outcomes(facing.transfer), "a broken connection alone ends a transfer")
        facing.reconnect()
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-005",
    "half-closed",
    "The peer closes its half of the connection at every step of a transfer: it goes on over the next one.",
    profile=Profile.RESILIENCE,
)
def half_closed(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        facing.line.end_of_stream()
        facing.line.hang_up()
        facing.reconnect()
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-006",
    "keepalive",
    "Nothing is said while a transfer is open: the instance sends Renew with `echo` each `keepalive_s`, and a peer "
    "that answers does not count as lost.",
)
def keepalive(context: Context) -> None:
    encounter = Encounter(context, keepalive_s=0.1 * context.pace, lost_s=0.5 * context.pace)
    facings = list(encounter.everywhere(Step.MOVING))
    before = {facing.transfer: facing.line.pings for facing in facings}
    encounter.linger(0.9 * context.pace)
    for facing in facings:
        pings = facing.line.pings - before[facing.transfer]
        context.check(pings >= 3, f"{pings} keepalives in 0.9 s, each 0.1 s one is due")
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-006",
    "silence",
    "A peer stops to say anything at every step of a transfer: after `lost_s` the transfer fails with `peer_lost`.",
)
def silence(context: Context) -> None:
    encounter = Encounter(context, keepalive_s=0.1 * context.pace, lost_s=0.6 * context.pace)
    for step in (Step.MOVING, Step.SETTLING):
        lost: list[Facing] = []
        for facing in encounter.everywhere(step):
            if (facing.mode, facing.side) == (Mode.PULL, Side.TARGET):
                facing.well()  # it waits for its lease
            else:
                facing.peer.polite = False
                lost.append(facing)
        for facing in lost:
            facing.hand_over()
            freed = facing.side is Side.INITIATOR or Feature.FORBID in context.features
            encounter.fails(facing.transfer, Reason.PEER_LOST, released=freed)
        for facing in lost:
            facing.line.say(Stopped(facing.transfer, Reason.ABORTED))
    encounter.over()


@case(
    "KVX-EPO-006",
    "refused",
    "The peer that was dialled is gone and its address refuses, while a transfer is open: it fails with `peer_lost` "
    "long before `lost_s`.",
)
def gone(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.EXPOSED, Step.MOVING):
        if facing.line.dialler or not facing.bound:
            facing.well()
            continue
        facing.peer.stop_listening()
        facing.line.close()
        began = time.monotonic()
        facing.hand_over()
        keeps = facing.side is Side.TARGET and Feature.FORBID not in context.features
        encounter.fails(facing.transfer, Reason.PEER_LOST, Reason.TRANSPORT, released=not keeps)
        took = time.monotonic() - began
        context.check(took < 4.0 * context.pace, f"a refused reconnect counts after {took:.1f} s")
    encounter.serves()
    encounter.intact()


@case(
    "KVX-EPO-007",
    "repeats",
    "The connection is cut with Grant, Renew or Done unanswered: after Hello each is said again.",
)
def repeats(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.EXPOSED, Step.GRANTED, Step.SETTLING):
        due: type[Message] | None = None
        if facing.side is Side.INITIATOR:
            due = {Step.GRANTED: Renew, Step.SETTLING: Done}.get(facing.step or Step.EXPOSED)
        elif facing.mode is Mode.PUSH:
            due = GrantMessage
        facing.line.close()
        line = facing.reconnect()
        if due is not None:
            context.check(line.hear(due, facing.transfer), f"{due.__name__} is not said again")
        facing.well()
    encounter.over()


@case(
    "KVX-EPO-007",
    "answers-once",
    "The connection is cut after Ack, or after Stopped: neither is said again of its own accord.",
)
def answers_once(context: Context) -> None:
    encounter = Encounter(context)
    lines = []
    for facing in encounter.everywhere(Step.OVER, sides=(Side.TARGET,)):
        facing.line.close()
        lines.append(facing.peer.dial(encounter.toy.info.address).greet())
    for facing in encounter.everywhere(Step.GRANTED, sides=(Side.INITIATOR,)):
        facing.line.say(Revoke(facing.transfer, Reason.ABORTED))
        facing.line.hear(Stopped, facing.transfer)
        facing.hand_over()
        encounter.fails(facing.transfer, Reason.ABORTED)
        facing.line.close()
        lines.append(facing.peer.dial(encounter.toy.info.address).greet())
    encounter.linger()
    for line in lines:
        context.check(not line.said(Ack) and not line.said(Stopped), f"after Hello comes again: {line.story()}")
    encounter.over()
