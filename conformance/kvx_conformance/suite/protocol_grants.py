"""Cases of the sentences on grants, tickets, bounds and legs: GRT, TKT, BND, LEG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from kvx.core import wire
from kvx.core.messages import Ack, Done, Renew, Revoke, Stopped
from kvx.core.model import BlockTable, Mode, Offered, Reason, Side, Ticket
from kvx_conformance.suite.case import Context, case
from kvx_conformance.suite.encounter import CUT, Encounter, Facing, Step
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.toy_under_test import BLOCKS, TOKENS

WRITE, READ = (Feature.WRITE,), (Feature.READ,)


def untouched(facing: Facing) -> None:
    """No byte has reached the peer's blocks (or left them: a READ would have filled the toy's)."""
    blocks = facing.mine.groups[0]
    dirty = [block for block in blocks if not facing.peer.cache.poisoned(block)]
    facing.encounter.context.check(not dirty, f"blocks {dirty} were written, but nothing may move")


# ---------------------------------------------------------------------------- grants


@case(
    "KVX-GRT-001",
    "says-who",
    "The instance grants blocks for a push: the grant names it, its epoch, its blocks and the whole prompt.",
    needs=WRITE,
)
def says_who(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.TARGET).to(Step.EXPOSED)
    grant, toy = facing.grant, encounter.toy
    first, blocks = toy.actor.table("t")
    due = (toy.info.peer, toy.info.epoch, Mode.PUSH, (first,), blocks, TOKENS, toy.info.address)
    says = (grant.owner, grant.epoch, grant.mode, grant.first, grant.blocks, grant.tokens, grant.address)
    context.check(says == due, f"the grant says {says}; due is {due}")
    context.check(0 < grant.lease_s <= 12.0 * context.pace, f"its lease is {grant.lease_s} s of 12 s")
    facing.well()
    encounter.over()


@case(
    "KVX-GRT-002",
    "permitted-before",
    "A producer writes the moment that it has its grant, on a connection of its own: every time its bytes are let in.",
    needs=WRITE,
)
def permitted_before(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer()
    for number in range(12):
        facing = encounter.facing(f"t-{number}", Mode.PUSH, Side.TARGET, peer).to(Step.EXPOSED)
        facing.well()
    encounter.over()


@case(
    "KVX-GRT-003",
    "over",
    "A grant comes again for a transfer that is done, or has failed, and for a new one while the instance drains: "
    "each is answered Stopped.",
    needs=WRITE,
)
def grant_over(context: Context) -> None:
    encounter = Encounter(context)
    done = encounter.facing("done", Mode.PUSH, Side.INITIATOR).to(Step.OVER)
    failed = encounter.facing("failed", Mode.PUSH, Side.INITIATOR).to(Step.MOVING)
    failed.abort()
    failed.line.hear(Stopped, "failed")
    encounter.fails("failed", Reason.ABORTED)
    for facing in (done, failed):
        facing.line.say(facing.peer.granting(facing.grant, facing.theirs))
        context.check(facing.line.hear(Stopped, facing.transfer), "no Stopped comes")
    encounter.over()
    encounter.toy.call("drain", "", Mode.PUSH, lease_s=0.5)
    encounter.linger(0.2)
    late = done.peer.grant("late", Mode.PUSH, done.peer.take(BLOCKS), TOKENS)
    done.line.say(done.peer.granting(late, done.theirs))
    context.check(done.line.hear(Stopped, "late").reason is Reason.DRAINING, "another reason than draining")
    encounter.intact()


@case(
    "KVX-GRT-004",
    "not-met",
    "A grant comes that no engine has met: it is not renewed. It is as soon as the engine claims.",
    needs=WRITE,
)
def not_met(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR)
    facing.claimed = False
    facing.to(Step.EXPOSED)
    facing.grant = evolve(facing.grant, lease_s=0.9 * context.pace)
    facing.to(Step.GRANTED)
    encounter.linger(0.5 * context.pace)
    context.check(not facing.line.said(Renew, "t"), "a grant is renewed that no engine has met")
    facing.call("claim")
    context.check(facing.line.hear(Renew, "t"), "the grant is not renewed")
    facing.well()
    encounter.over()


@case(
    "KVX-GRT-005",
    "early",
    "A grant comes before the engine has said a word of the transfer: it is kept and offered, and serves the engine's"
    " first part.",
    needs=WRITE,
)
def early(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR)
    facing.claimed = False
    facing.to(Step.GRANTED)
    encounter.until(lambda: encounter.toy.told.get("t"), "the grant is offered to the engine")
    offered = encounter.toy.told["t"][0]
    context.check(
        isinstance(offered, Offered) and offered.grant == facing.grant, f"the engine is told {offered}, not the grant"
    )
    facing.well()
    encounter.over()


# --------------------------------------------------------------------------- tickets


@case(
    "KVX-TKT-001",
    "forged",
    "A router gives tickets back that nobody made, or that were changed: each is refused, the true one still works.",
    needs=READ,
)
def forged(context: Context) -> None:
    encounter = Encounter(context, key="a secret that this case alone knows")
    facing = encounter.facing("t", Mode.PULL, Side.TARGET).to(Step.EXPOSED)
    true = encounter.toy.ticket("t")
    wrong: dict[str, Ticket] = {
        "another MAC": evolve(true, mac=bytes(32)),
        "a short MAC": evolve(true, mac=true.mac[:16]),
        "no MAC": evolve(true, mac=b""),
        "another key's MAC": wire.make_ticket(true.grant, b"another secret altogether"),
        "no key": wire.make_ticket(true.grant, b""),
        "more blocks": evolve(true, grant=evolve(true.grant, blocks=BlockTable.of(range(8)))),
        "another epoch": evolve(true, grant=evolve(true.grant, epoch=true.grant.epoch ^ 1)),
        "another lease": evolve(true, grant=evolve(true.grant, lease_s=600.0)),
    }
    for what, ticket in wrong.items():
        ack = encounter.command("release", wire.ticket_text(ticket))
        context.check(not ack.ok, f"a ticket with {what} releases the blocks")
    facing.well()
    encounter.over()


@case(
    "KVX-TKT-002",
    "of-another-start",
    "A reader has a ticket of another start of its owner: it fails with reason `epoch`, and no byte moves.",
    needs=READ,
)
def of_another_start(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PULL, Side.INITIATOR)
    peer = facing.peer
    old = peer.grant("t", Mode.PULL, peer.take(BLOCKS), TOKENS, epoch=peer.epoch ^ 1)
    encounter.toy.call("stage", "t", Mode.PULL, ticket=peer.ticket(old), producer="peer")
    line = peer.accept().greet()
    encounter.fails("t", Reason.EPOCH)
    context.check(not line.said(Done), "Done is said for a ticket of another start")
    encounter.over()


@case(
    "KVX-TKT-003",
    "second-reader",
    "Another reader shows a ticket that one has taken up: its Renew is answered Revoke and its Done Ack(false), and "
    "the first one has the bytes.",
    needs=READ,
)
def second_reader(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PULL, Side.TARGET).to(Step.GRANTED)
    facing.line.barrier()
    for step in (Step.GRANTED, Step.MOVING, Step.OVER):
        facing.to(step)
        other = encounter.peer(f"second-{step.value}")
        line = other.dial(encounter.toy.info.address).greet()
        line.say(Renew(("t",)))
        context.check(line.hear(Revoke, "t"), "no Revoke comes")
        line.say(other.done("t", other.learn(line), facing.role))
        context.check(not line.hear(Ack, "t").ok, "a second reader's Done is acknowledged")
    encounter.over()


@case(
    "KVX-TKT-003",
    "bound-by-done",
    "A reader says Done before any Renew: the ticket is its own, and another one's Renew is answered Revoke.",
    needs=READ,
)
def bound_by_done(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PULL, Side.TARGET).to(Step.EXPOSED)
    facing.carry(0, TOKENS)
    facing.say_done()
    context.check(facing.line.hear(Ack, "t").ok, "Done of the only reader is not acknowledged")
    line = encounter.peer("second").dial(encounter.toy.info.address).greet()
    line.say(Renew(("t",)))
    context.check(line.hear(Revoke, "t"), "no Revoke comes")
    encounter.outcome("t")
    encounter.over()


@case(
    "KVX-TKT-004",
    "queueing",
    "A reader has a ticket and no blocks yet: it renews each third of the lease.",
    needs=READ,
)
def queueing(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PULL, Side.INITIATOR)
    facing.lease_s = 0.6 * context.pace
    facing.to(Step.GRANTED)
    before = len(facing.line.said(Renew, "t"))
    encounter.linger(1.0 * context.pace)
    renewed = len(facing.line.said(Renew, "t")) - before
    context.check(renewed >= 3, f"{renewed} renewals in 1 s of a lease of 0.6 s")
    facing.well()
    encounter.over()


@case(
    "KVX-TKT-005",
    "refused-early",
    "An engine refuses a request before it has blocks: the ticket's owner hears Stopped.",
    needs=READ,
)
def refused_early(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer()
    ticket = peer.ticket(peer.grant("t", Mode.PULL, peer.take(BLOCKS), TOKENS))
    encounter.toy.call("abort", "t", Mode.PULL, ticket=ticket, producer="peer")
    context.check(peer.accept().greet().hear(Stopped, "t"), "no Stopped comes")
    encounter.over()


# ---------------------------------------------------------------------------- bounds


def bad_grants() -> dict[str, dict[str, Any]]:
    """Changes of a grant of four blocks at most 24 that no initiator may act on."""
    return {
        "a block beyond the pool": {"blocks": BlockTable.of([0, 1, 2, 24])},
        "a block far beyond": {"blocks": BlockTable.of([0, 1, 2, 2**40])},
        "a block twice": {"blocks": BlockTable.of([0, 1, 1, 2])},
        "too few blocks": {"blocks": BlockTable.of([0, 1, 2])},
        "too many blocks": {"blocks": BlockTable.of([0, 1, 2, 3, 4])},
        "blocks that are not the tail": {"first": (1,)},
        "two groups": {"first": (0, 0), "blocks": BlockTable.of([0, 1, 2, 3], [4])},
        "no groups": {"first": (), "blocks": BlockTable.of()},
    }


def _refuses(context: Context, rule: Callable[[str], bool]) -> None:
    encounter = Encounter(context)
    for number, (what, changes) in enumerate(bad_grants().items()):
        if not rule(what):
            continue
        for mode in encounter.modes():
            facing = encounter.facing(f"{mode.value}-{number}", mode, Side.INITIATOR)
            facing.altered, facing.permits = changes, False
            facing.to(Step.EXPOSED)
            if mode is Mode.PUSH:
                facing.line.say(facing.peer.granting(facing.grant, facing.theirs))
            facing.hand_over()
            outcome = encounter.fails(facing.transfer, Reason.BOUNDS, Reason.LAYOUT)
            context.check(outcome.bytes == 0, f"{what}: {outcome.bytes} bytes were moved")
            if mode is Mode.PUSH:
                untouched(facing)
    encounter.over()


@case(
    "KVX-BND-001",
    "block-ids",
    "A grant and a ticket name blocks that their owner does not have, or one twice: the transfer fails with `bounds`,"
    " and no byte moves.",
)
def block_ids(context: Context) -> None:
    _refuses(context, lambda what: what.startswith("a block"))


@case(
    "KVX-BND-002",
    "not-the-tail",
    "A grant and a ticket have too few or too many blocks for their prompt, or of other groups: the transfer fails "
    "with `bounds`, and no byte moves.",
)
def not_the_tail(context: Context) -> None:
    _refuses(context, lambda what: not what.startswith("a block"))


@case(
    "KVX-BND-004",
    "first",
    "Done says that blocks were moved that were not exposed: Ack(false) with `bounds`, and the transfer fails.",
)
def first(context: Context) -> None:
    encounter = Encounter(context)
    wrong: dict[Mode, list[tuple[int, ...]]] = {
        Mode.PUSH: [(5,), (1,), (2**40,), (0, 0), ()],
        Mode.PULL: [(0, 0), (), (2**40,)],
    }
    for mode in encounter.modes():
        for number, places in enumerate(wrong[mode]):
            facing = encounter.facing(f"{mode.value}-{number}", mode, Side.TARGET).to(Step.MOVING)
            facing.say_done(first=places)
            _out_of_bounds(facing, places)
    if Mode.PULL in encounter.modes():
        facing = encounter.facing("tail", Mode.PULL, Side.TARGET)
        facing.start = 16
        facing.to(Step.EXPOSED).say_done(first=(0,))
        _out_of_bounds(facing, (0,))
    encounter.over()


def _out_of_bounds(facing: Facing, places: tuple[int, ...]) -> None:
    ack, check = facing.line.hear(Ack, facing.transfer), facing.encounter.context.check
    check((ack.ok, ack.reason) == (False, Reason.BOUNDS), f"Done with first = {places} is answered {ack}")
    facing.encounter.fails(facing.transfer, Reason.BOUNDS)


@case(
    "KVX-DAT-004",
    "prompts-differ",
    "Grant and engine speak of prompts of other lengths, or a part in the middle is never handed over: the transfer "
    "fails with `bounds`, and is not said to be done.",
)
def prompts_differ(context: Context) -> None:
    encounter = Encounter(context)
    for mode in encounter.modes():
        facing = encounter.facing(f"{mode.value}-tokens", mode, Side.INITIATOR).to(Step.GRANTED)
        ticket = facing.peer.ticket(facing.grant) if mode is Mode.PULL else None
        facing.call("stage", tokens=TOKENS - 5, ticket=ticket)
        gap = encounter.facing(f"{mode.value}-gap", mode, Side.INITIATOR).to(Step.GRANTED)
        gap.stage(0, 16, last=False)
        gap.stage(CUT, TOKENS)
        for one in (facing, gap):
            encounter.fails(one.transfer, Reason.BOUNDS)
            one.line.barrier()
            context.check(not one.line.said(Done, one.transfer), "Done is said for a prompt that is not whole")
    encounter.over()


@case(
    "KVX-DAT-004",
    "digests-differ",
    "A grant brings the digest of its prompt. The engine's part is of a prompt of another digest: the transfer fails "
    "with `prompt`, the owner hears Stopped, and no byte moves. With the same digest it is well.",
    needs=WRITE,
)
def digests_differ(context: Context) -> None:
    encounter = Encounter(context)
    for ours, theirs in (("aa", "bb"), ("aa", "aa")):
        facing = encounter.facing(f"{ours}-{theirs}", Mode.PUSH, Side.INITIATOR).to(Step.EXPOSED)
        facing.peer.permit(facing.grant, facing.theirs)
        facing.line.say(facing.peer.granting(facing.grant, facing.theirs, prompt=theirs))
        facing.line.barrier()
        facing.call("stage", prompt=ours)
        if ours != theirs:
            context.check(
                facing.line.hear(Stopped, facing.transfer).reason is Reason.PROMPT, "another reason than prompt"
            )
            encounter.fails(facing.transfer, Reason.PROMPT)
            untouched(facing)
        else:
            facing.hear_done()
            facing.step = Step.SETTLING
            facing.well()
    encounter.over()


# ------------------------------------------------------------------------------ legs


@case(
    "KVX-LEG-002",
    "grant",
    "A grant names other legs or another plan: the transfer fails with `layout` at once, the owner hears Stopped, and"
    " no byte moves.",
    needs=WRITE,
)
def other_legs(context: Context) -> None:
    encounter = Encounter(context)
    wrong: list[dict[str, Any]] = [{"legs": (0, 1)}, {"legs": ()}, {"legs": (1,)}, {"plan": "0" * 32}, {"plan": ""}]
    for number, changes in enumerate(wrong):
        facing = encounter.facing(f"t-{number}", Mode.PUSH, Side.INITIATOR).to(Step.EXPOSED)
        facing.line.say(facing.peer.granting(facing.grant, facing.theirs, **changes))
        facing.line.hear(Stopped, facing.transfer)
        facing.hand_over()
        encounter.fails(facing.transfer, Reason.LAYOUT)
        untouched(facing)
    encounter.over()


@case(
    "KVX-LEG-002",
    "done",
    "Done names other legs or another plan: Ack(false) with `layout`, and the transfer fails at once.",
)
def other_plan(context: Context) -> None:
    encounter = Encounter(context)
    wrong: list[dict[str, Any]] = [{"legs": (0, 1)}, {"legs": (1,)}, {"plan": "0" * 32}]
    for number, changes in enumerate(wrong):
        for mode in encounter.modes():
            facing = encounter.facing(f"{mode.value}-{number}", mode, Side.TARGET).to(Step.MOVING)
            facing.say_done(**changes)
            ack = facing.line.hear(Ack, facing.transfer)
            context.check((ack.ok, ack.reason) == (False, Reason.LAYOUT), f"Done with {changes} is answered {ack}")
            encounter.fails(facing.transfer, Reason.LAYOUT)
    encounter.over()


@case(
    "KVX-LEG-004",
    "aborted",
    "The engine aborts at every step, in every role: one Outcome and one Released are told, and no more.",
)
def aborted(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*Step):
        before = len(encounter.toy.told.get(facing.transfer, ()))
        facing.abort()
        if facing.step is Step.OVER:
            facing.line.barrier()
            context.check(len(encounter.toy.told[facing.transfer]) == before, "something is told of what is over")
            continue
        if facing.step is Step.SETTLING:
            facing.line.say(Ack(facing.transfer, True))
        elif facing.mode is Mode.PUSH and facing.side is Side.TARGET:
            facing.line.hear(Revoke, facing.transfer)
            facing.line.say(Stopped(facing.transfer, Reason.ABORTED))
        outcome = encounter.outcome(facing.transfer)
        due = facing.step is Step.SETTLING
        context.check(outcome.ok is due, f"aborted when {facing.step}: {outcome}")
        if facing.step is not Step.EXPOSED or facing.side is Side.TARGET:
            facing.line.barrier()
    encounter.over()
