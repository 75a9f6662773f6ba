"""Cases of the sentences on aborts, fences and quarantine: RVK, FEN."""

from __future__ import annotations

from kvx.core.messages import Ack, Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.suite.case import Context, case
from kvx_conformance.suite.encounter import CUT, Encounter, Step
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.toy_under_test import TOKENS

WRITE, READ = (Feature.WRITE,), (Feature.READ,)
_BEFORE_DONE = (Step.EXPOSED, Step.GRANTED, Step.MOVING)


@case(
    "KVX-RVK-001",
    "late-write",
    "A producer writes once more when its push is over, done or aborted. Nothing lands in blocks that have gone back.",
    needs=(*WRITE, Feature.FORBID),
)
def late_write(context: Context) -> None:
    encounter = Encounter(context)
    done = encounter.facing("done", Mode.PUSH, Side.TARGET).to(Step.OVER)
    aborted = encounter.facing("aborted", Mode.PUSH, Side.TARGET).to(Step.MOVING)
    aborted.abort()
    encounter.fails("aborted", Reason.ABORTED)
    for facing in (done, aborted):
        context.check(not facing.write_late(), f"a write after {facing.transfer} is let in")
        encounter.intact()
    encounter.over()


@case(
    "KVX-RVK-001",
    "pinned",
    "A push is aborted where nothing can be forbidden: the outcome is told, and the blocks stay out until Stopped "
    "comes, whatever the time.",
    needs=WRITE,
    lacks=(Feature.FORBID,),
)
def pinned(context: Context) -> None:
    encounter = Encounter(context, grace_s=0.3 * context.pace, drain_limit_s=0.1 * context.pace)
    for step in (Step.EXPOSED, Step.MOVING):
        facing = encounter.facing(step.value, Mode.PUSH, Side.TARGET).to(step)
        facing.abort()
        facing.line.hear(Revoke, facing.transfer)
        encounter.fails(facing.transfer, Reason.ABORTED, released=False)
        encounter.linger(0.5 * context.pace)
        context.check(not encounter.toy.released(facing.transfer), "blocks come back although their writer may write")
        facing.carry(0, TOKENS)
        facing.line.say(Stopped(facing.transfer, Reason.ABORTED))
    encounter.over()


@case(
    "KVX-RVK-001",
    "anothers-stopped",
    "Another proven peer says Stopped, Done and Revoke for a push that it has no part in: the blocks stay where they "
    "are, and the push ends well.",
    needs=WRITE,
)
def anothers_stopped(context: Context) -> None:
    encounter = Encounter(context)
    other = encounter.peer("stranger")
    stranger = other.dial(encounter.toy.info.address).greet()
    theirs = other.learn(stranger)
    for step in (Step.EXPOSED, Step.MOVING):
        facing = encounter.facing(step.value, Mode.PUSH, Side.TARGET).to(step)
        stranger.say(Stopped(facing.transfer, Reason.ABORTED))
        stranger.say(Revoke(facing.transfer, Reason.ABORTED))
        stranger.say(other.done(facing.transfer, theirs, facing.role))
        context.check(not stranger.hear(Ack, facing.transfer).ok, "a stranger's Done is acknowledged")
        context.check(not encounter.toy.told.get(facing.transfer), "a stranger's word ends a transfer")
        facing.well()
    encounter.over()


@case(
    "KVX-RVK-002",
    "stops",
    "A revoked initiator says Stopped at every step before Done: from then on no byte of it lands, whatever its "
    "engine hands over.",
)
def stops(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*_BEFORE_DONE, sides=(Side.INITIATOR,)):
        if not facing.bound:
            facing.to(Step.GRANTED)
        facing.line.say(Revoke(facing.transfer, Reason.ABORTED))
        facing.line.hear(Stopped, facing.transfer)
        before = bytes(facing.peer.cache.memory)
        facing.hand_over()
        encounter.fails(facing.transfer, Reason.ABORTED)
        encounter.linger()
        context.check(before == bytes(facing.peer.cache.memory), "bytes land after Stopped")
    encounter.over()


@case(
    "KVX-RVK-003",
    "answers-again",
    "Revoke comes again after Stopped was said: it is answered again.",
)
def answers_again(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.MOVING, sides=(Side.INITIATOR,)):
        for _ in range(3):
            facing.line.say(Revoke(facing.transfer, Reason.ABORTED))
            context.check(facing.line.hear(Stopped, facing.transfer), "no Stopped comes")
        facing.hand_over()
        encounter.fails(facing.transfer, Reason.ABORTED)
        facing.line.say(Revoke(facing.transfer, Reason.ABORTED))
        context.check(facing.line.hear(Stopped, facing.transfer), "no Stopped comes when it is over")
    encounter.over()


@case(
    "KVX-RVK-004",
    "crosses-done",
    "Done comes after the target has said Revoke: Ack(false), and the blocks come back.",
    needs=WRITE,
)
def crosses_done(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.MOVING)
    facing.carry(CUT, TOKENS)
    facing.abort()
    facing.line.hear(Revoke, "t")
    facing.say_done()
    context.check(not facing.line.hear(Ack, "t").ok, "a Done that crosses Revoke is acknowledged")
    encounter.fails("t", Reason.ABORTED)
    encounter.over()


@case(
    "KVX-RVK-005",
    "asked-again",
    "Revoke is not answered where nothing can be forbidden: it comes again after a reconnect, and each `grace_s`.",
    needs=WRITE,
    lacks=(Feature.FORBID,),
)
def asked_again(context: Context) -> None:
    encounter = Encounter(context, grace_s=0.3 * context.pace, drain_limit_s=0.1 * context.pace)
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.MOVING)
    facing.abort()
    for _ in range(3):
        context.check(facing.line.hear(Revoke, "t"), "no Revoke comes")
    facing.line.close()
    context.check(facing.reconnect().hear(Revoke, "t"), "no Revoke comes after a reconnect")
    facing.line.say(Stopped("t", Reason.ABORTED))
    encounter.fails("t", Reason.ABORTED)
    encounter.over()


@case(
    "KVX-RVK-006",
    "does-not-wait",
    "The owner of a ticket aborts while its reader reads and says nothing: it is released at once, and the reader's "
    "Done is answered Ack(false).",
    needs=READ,
)
def does_not_wait(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.EXPOSED, Step.GRANTED, Step.MOVING, sides=(Side.TARGET,)):
        if facing.mode is Mode.PUSH:
            facing.well()
            continue
        facing.abort()
        encounter.fails(facing.transfer, Reason.ABORTED)
        facing.say_done()
        context.check(not facing.line.hear(Ack, facing.transfer).ok, "the Done of a reader of freed blocks is accepted")
    encounter.over()


@case(
    "KVX-RVK-007",
    "overtakes",
    "Revoke comes before the Grant that it is about: the Grant is answered Stopped, and the engine's part fails.",
    needs=WRITE,
)
def overtakes(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR)
    facing.claimed = False
    facing.to(Step.EXPOSED)
    facing.line.say(Revoke("t", Reason.ABORTED))
    facing.line.hear(Stopped, "t")
    facing.line.say(facing.peer.granting(facing.grant, facing.theirs))
    context.check(facing.line.hear(Stopped, "t"), "no Stopped comes")
    facing.hand_over()
    encounter.fails("t", Reason.ABORTED)
    encounter.over()


# ------------------------------------------------------------------------ quarantine


@case(
    "KVX-FEN-001",
    "older-grants",
    "A writer that does not answer Revoke is fenced: what it was granted before dies with the old generation, and what "
    "it is granted later carries a new one.",
    needs=(Feature.WRITE, Feature.FENCE),
    lacks=(Feature.FORBID,),
)
def older_grants(context: Context) -> None:
    encounter = Encounter(context, grace_s=0.3 * context.pace, drain_limit_s=0.1 * context.pace)
    peer = encounter.peer("writer")
    silent, beside = (encounter.facing(t, Mode.PUSH, Side.TARGET, peer).to(Step.EXPOSED) for t in ("silent", "beside"))
    silent.abort()
    encounter.fails("silent", Reason.ABORTED)
    encounter.fails("beside", Reason.PEER_LOST)
    for facing in (silent, beside):
        context.check(not facing.write_late(), f"{facing.transfer}: a fenced writer writes into blocks that are free")
    later = encounter.facing("later", Mode.PUSH, Side.TARGET, peer).to(Step.EXPOSED)
    context.check(
        later.grant.generation > beside.grant.generation,
        f"after the fence the generation is {later.grant.generation}, before it was {beside.grant.generation}",
    )
    later.well()
    encounter.over()


@case(
    "KVX-FEN-002",
    "quarantine",
    "A writer vanishes where nothing can be forbidden or fenced: its blocks stay out until another start of it is "
    "proven, and `quarantine_s` longer.",
    needs=WRITE,
    lacks=(Feature.FORBID, Feature.FENCE),
)
def quarantine(context: Context) -> None:
    encounter = Encounter(
        context, keepalive_s=0.1 * context.pace, lost_s=0.4 * context.pace, grace_s=2.5 * context.pace
    )
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.MOVING)
    facing.peer.polite = False
    encounter.fails("t", Reason.PEER_LOST, released=False)
    encounter.linger(0.5 * context.pace)
    context.check(not encounter.toy.released("t"), "blocks come back by time, although their writer may live")
    facing.peer.restart()
    facing.peer.polite = True
    facing.peer.dial(encounter.toy.info.address).greet()
    encounter.until(lambda: encounter.toy.released("t"), "the blocks come back when their writer is proven dead")
    encounter.over()


@case(
    "KVX-FEN-003",
    "outcome-first",
    "A transfer fails while its blocks are in quarantine: the outcome is told at once, and Released with Stopped.",
    needs=WRITE,
    lacks=(Feature.FORBID, Feature.FENCE),
)
def outcome_first(context: Context) -> None:
    encounter = Encounter(context, grace_s=0.3 * context.pace, drain_limit_s=0.1 * context.pace)
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.MOVING)
    facing.abort()
    encounter.fails("t", Reason.ABORTED, released=False)
    context.check(not encounter.toy.released("t"), "Released comes with the outcome")
    facing.line.say(Stopped("t", Reason.ABORTED))
    encounter.over()
