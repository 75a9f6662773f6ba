"""Cases of the sentences on transfers that are unknown or over, on drain and commands: UNK, DRN."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from itertools import chain

from kvx.core import wire
from kvx.core.messages import Ack, Renew, Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.suite.case import Context, Finding, case
from kvx_conformance.suite.encounter import Encounter, Facing, Step
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.toy_under_test import TOKENS

WRITE, READ = (Feature.WRITE,), (Feature.READ,)
_CLOSE_S = 8.0
_BEFORE_DONE = (Step.EXPOSED, Step.GRANTED, Step.MOVING)


@case(
    "KVX-UNK-001",
    "never-heard-of",
    "Every message comes for a transfer never heard of: Revoke is answered Stopped, Renew is answered Revoke after "
    "one lease, Done is answered Ack(false) after one grace, and Ack and Stopped not at all.",
)
def never_heard_of(context: Context) -> None:
    encounter = Encounter(
        context,
        lease_s=0.5 * context.pace,
        lost_s=0.3 * context.pace,
        keepalive_s=0.1 * context.pace,
        grace_s=0.4 * context.pace,
        drain_limit_s=0.2 * context.pace,
    )
    peer = encounter.peer()
    line = peer.dial(encounter.toy.info.address).greet()
    facing = encounter.facing("done", encounter.modes()[0], Side.TARGET, peer)
    line.say(Ack("ack", True))
    line.say(Stopped("stopped", Reason.ABORTED))
    line.say(Revoke("revoke", Reason.ABORTED))
    context.check(line.hear(Stopped, "revoke"), "Revoke is not answered")
    line.say(Renew(("renew",)))
    line.say(peer.done("done", peer.learn(line), facing.role))
    encounter.until(lambda: line.said(Ack, "done"), "Done is answered")
    encounter.until(lambda: line.said(Revoke, "renew"), "Renew is answered")
    context.check(not line.said(Ack, "done")[0].ok, "Done is answered Ack(true)")
    unasked = [m for m in line.heard if getattr(m, "transfer", None) in ("ack", "stopped")]
    context.check(not unasked, f"answers that nobody waits for: {unasked}")
    encounter.intact()


@case(
    "KVX-UNK-001",
    "over",
    "Every message comes for a transfer that is over, done or failed, in every role: each has its answer, and nothing"
    " is told again.",
)
def all_over(context: Context) -> None:
    encounter = Encounter(context)
    failed = list[Facing]()
    for facing in encounter.everywhere(Step.MOVING):
        facing.abort()
        facing.line.hear(Stopped if facing.side is Side.INITIATOR else Revoke, facing.transfer)
        if (facing.mode, facing.side) == (Mode.PUSH, Side.TARGET):
            facing.line.say(Stopped(facing.transfer, Reason.ABORTED))
        encounter.fails(facing.transfer, Reason.ABORTED)
        failed.append(facing)
    for facing in chain(failed, encounter.everywhere(Step.OVER)):
        line, told = facing.line, len(encounter.toy.told[facing.transfer])
        line.say(Ack(facing.transfer, True))
        line.say(Stopped(facing.transfer, Reason.ABORTED))
        line.say(Revoke(facing.transfer, Reason.ABORTED))
        context.check(line.hear(Stopped, facing.transfer), "Revoke is not answered")
        line.say(Renew((facing.transfer,)))
        answer: type[Stopped | Revoke] = Stopped if facing.side is Side.INITIATOR else Revoke
        context.check(line.hear(answer, facing.transfer), "Renew is not answered")
        if facing.mode is Mode.PUSH:
            line.say(
                facing.peer.granting(facing.peer.grant(facing.transfer, Mode.PUSH, facing.mine, TOKENS), facing.theirs)
            )
            context.check(line.hear(Stopped, facing.transfer), "Grant is not answered")
        line.say(facing.peer.done(facing.transfer, facing.theirs, facing.role))
        due = facing.side is Side.TARGET and facing.step is Step.OVER
        context.check(line.hear(Ack, facing.transfer).ok is due, f"Done is answered Ack({not due})")
        line.barrier()
        context.check(len(encounter.toy.told[facing.transfer]) == told, "something is told of what is over")
    encounter.over()


@case(
    "KVX-UNK-004",
    "one-letter",
    "Two transfers have ids of 128 characters that differ in the last one, and one is aborted: the other one is not "
    "touched.",
)
def one_letter(context: Context) -> None:
    encounter = Encounter(context)
    for mode, side in encounter.roles():
        peer = encounter.peer(f"{mode.value}-{side.value}")
        stem = f"{mode.value}-{side.value}".ljust(127, "x")
        one = encounter.facing(stem + "1", mode, side, peer).to(Step.MOVING)
        two = encounter.facing(stem + "2", mode, side, peer).to(Step.MOVING)
        one.abort()
        one.line.hear(Stopped if side is Side.INITIATOR else Revoke, one.transfer)
        if (mode, side) == (Mode.PUSH, Side.TARGET):
            one.line.say(Stopped(one.transfer, Reason.ABORTED))
        encounter.fails(one.transfer, Reason.ABORTED)
        two.well()
    encounter.over()


@case(
    "KVX-DRN-001",
    "drains",
    "The engine drains while transfers are open: one ends well within the grace, one is aborted when it is over, and "
    "new ones are refused with `draining`.",
)
def drains(context: Context) -> None:
    encounter = Encounter(context)
    open_ = list(encounter.everywhere(Step.MOVING))
    late = encounter.facing("late", encounter.modes()[0], Side.TARGET)
    encounter.toy.call("drain", "", Mode.PUSH, lease_s=0.8 * context.pace)
    late.call("expose", address=late.peer.address if late.mode is Mode.PUSH else None)
    encounter.fails("late", Reason.DRAINING)
    open_[0].well()
    for facing in open_[1:]:
        facing.line.hear(Stopped if facing.side is Side.INITIATOR else Revoke, facing.transfer)
        if (facing.mode, facing.side) == (Mode.PUSH, Side.TARGET):
            facing.line.say(Stopped(facing.transfer, Reason.DRAINING))
        facing.hand_over()
        encounter.fails(facing.transfer, Reason.DRAINING)
    encounter.intact()


@case(
    "KVX-DRN-002",
    "proof",
    "Commands come whose proof does not cover this connection's nonce, the verb, the argument or the secret: none is "
    "obeyed.",
)
def command_proof(context: Context) -> None:
    encounter = Encounter(context, key="a secret that this case alone knows")
    context.check(encounter.command("status").ok, "a good command is refused")
    wrong: dict[str, dict[str, object]] = {
        "the nonce": {"challenge": bytes(16)},
        "the verb": {"verb": "status"},
        "the argument": {"argument": "9"},
        "the secret": {"key": b"another secret altogether"},
        "a secret": {"key": b""},
    }
    for what, changes in wrong.items():
        context.check(not encounter.command("drain", "0", changes).ok, f"a proof without {what} is accepted")
    encounter.over()


@case(
    "KVX-DRN-002",
    "recorded",
    "A good command is said again, byte for byte, on another connection: it is not obeyed.",
)
def recorded_command(context: Context) -> None:
    encounter = Encounter(context, key="a secret that this case alone knows")
    context.check(encounter.command("status").ok, "a good command is refused")
    frame = bytes(encounter.peers[-1].lines[-1].sent)
    length = 4 + int.from_bytes(frame[:4])
    line = encounter.peers[-1].dial(encounter.toy.info.address).greet(2)
    line.send(frame[length:])
    context.check(not line.hear(Ack).ok, "a recorded command is obeyed")
    encounter.over()


@case(
    "KVX-DRN-003",
    "release",
    "A router gives a ticket back: the owner is released. Once a reader has taken it up, it is refused.",
    needs=READ,
)
def release(context: Context) -> None:
    encounter = Encounter(context)
    free = encounter.facing("free", Mode.PULL, Side.TARGET).to(Step.EXPOSED)
    context.check(encounter.command("release", wire.ticket_text(encounter.toy.ticket("free"))).ok, "it is refused")
    encounter.fails(free.transfer, Reason.ABORTED)
    taken = encounter.facing("taken", Mode.PULL, Side.TARGET).to(Step.GRANTED)
    taken.line.barrier()
    ack = encounter.command("release", wire.ticket_text(encounter.toy.ticket("taken")))
    context.check(not ack.ok, "a ticket is released that a reader has taken up")
    taken.well()
    encounter.over()


@case(
    "KVX-DRN-004",
    "withdraw",
    "A router withdraws a push that no consumer has granted blocks for: it ends, and one that the engine has not begun "
    "ends when it begins. One that is granted, one of a target's, and one that is over are refused.",
    needs=WRITE,
)
def withdraw(context: Context) -> None:
    encounter = Encounter(context)
    lonely = encounter.facing("lonely", Mode.PUSH, Side.INITIATOR).to(Step.EXPOSED)
    lonely.line.barrier()
    context.check(encounter.command("withdraw", "lonely").ok, "it is refused")
    lonely.hand_over()
    encounter.fails("lonely", Reason.ABORTED)
    context.check(encounter.command("withdraw", "early").ok, "it is refused before it has begun")
    encounter.facing("early", Mode.PUSH, Side.INITIATOR).hand_over()
    encounter.fails("early", Reason.ABORTED)
    granted = encounter.facing("granted", Mode.PUSH, Side.INITIATOR).to(Step.GRANTED)
    target = encounter.facing("target", Mode.PUSH, Side.TARGET).to(Step.EXPOSED)
    for name in ("granted", "target", "lonely", "early"):
        context.check(not encounter.command("withdraw", name).ok, f"the push {name!r} is withdrawn")
    for facing in (granted, target):
        facing.well()
    encounter.over()


@case(
    "KVX-DRN-005",
    "close",
    "The engine closes the instance while transfers are open in every role: it returns in bounded time, peers are "
    "told, and nobody listens any more.",
    limit_s=12.0,
)
def close(context: Context) -> None:
    encounter = Encounter(context)
    facings = list(encounter.everywhere(Step.MOVING))
    address = encounter.toy.info.address
    began = time.monotonic()
    encounter.toy.close()
    took = time.monotonic() - began
    context.check(took < _CLOSE_S * context.pace, f"`close` returns after {took:.1f} s")
    for facing in facings:
        facing.line.hear(Stopped if facing.side is Side.INITIATOR else Revoke, facing.transfer)
        facing.line.hang_up()
    host, _, port = address.rpartition(":")
    with suppress(ConnectionRefusedError), socket.create_connection((host, int(port)), timeout=1):
        raise Finding("a closed instance still listens")
    encounter.toy.close()
    encounter.intact()
