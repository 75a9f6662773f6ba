"""Cases of the sentences on who is who: HEL."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from attrs import evolve

from kvx.core.errors import KvxError
from kvx.core.messages import Hello, Renew, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.actor import Shape
from kvx_conformance.suite.case import Context, Finding, case
from kvx_conformance.suite.encounter import Encounter, Facing, Step
from kvx_conformance.suite.line import Line
from kvx_conformance.suite.protocol_wire import OPEN
from kvx_conformance.suite.toy_under_test import Toy

SECRET = "a secret that this case alone knows"  # noqa: S105 - it guards nothing
OTHER = Shape(block_size=16, model="another")


def refused(line: Line, reason: Reason) -> Hello:
    """The instance refuses with a sentence for this reason, and closes."""
    check = line.peer.context.check
    hello = line.hear(Hello)
    check(hello.refusal is not None, f"step {hello.step} comes where a refusal is due")
    check(hello.refusal is reason, f"the refusal is for {hello.refusal}; due is {reason}")
    check(hello.detail, "the refusal has no sentence")
    line.hang_up()
    return hello


def asked(encounter: Encounter, name: str, **more: Any) -> tuple[Facing, Line]:
    """A transfer for which the instance dials a peer, which has not answered yet."""
    mode = encounter.modes()[0]
    side = Side.TARGET if mode is Mode.PUSH else Side.INITIATOR
    facing = encounter.facing(name, mode, side, encounter.peer(f"peer-of-{name}", **more))
    if mode is Mode.PUSH:
        facing.call("expose", address=facing.peer.address)
    else:
        grant = facing.peer.grant(name, mode, facing.peer.take(4), 60)
        facing.call("stage", ticket=facing.peer.ticket(grant))
    return facing, facing.peer.accept()


def forgeries(line: Line) -> dict[str, Callable[[], bytes]]:
    """Proofs that must not hold on this line, by what they do not cover."""
    return {
        "the other side's nonce": lambda: line.proof(peer_nonce=secrets.token_bytes(16)),
        "its own nonce": lambda: line.proof(own_nonce=secrets.token_bytes(16)),
        "the other side's epoch": lambda: line.proof(peer_epoch=line.their_epoch ^ 1),
        "its own epoch": lambda: line.proof(own_epoch=line.peer.epoch ^ 1),
        "the direction": lambda: line.proof(dialler=not line.dialler),
        "its fingerprint": lambda: line.proof(fingerprint="0" * 32),
        "the secret": lambda: line.proof(key=b"a secret of somebody else"),
        "anything": lambda: b"",
    }


@case(
    "KVX-HEL-001",
    "no-body-for-a-stranger",
    "A peer that cannot prove who it is dials, and is dialled: it never gets a body.",
)
def no_body(context: Context) -> None:
    encounter = Encounter(context, key=SECRET)
    line = encounter.peer("dialler").dial(encounter.toy.info.address).greet(2)
    line.say(line.hello(3, proof=b"\0" * 32))
    line.hang_up()
    _no_body(context, line)
    facing, line = asked(encounter, "t")
    line.greet(1)
    line.say(line.hello(2, proof=b"\0" * 32))
    line.hang_up()
    _no_body(context, line)
    encounter.fails(facing.transfer, Reason.AUTH)
    encounter.over()


def _no_body(context: Context, line: Line) -> None:
    given = [hello.step for hello in line.said(Hello) if hello.info is not None or hello.metadata]
    context.check(not given, f"the body is given in step {given}, before the other side's proof held")


@case(
    "KVX-HEL-001",
    "no-body-for-other-caches",
    "A peer proves who it is and has another fingerprint: it gets the facts of the cache, and no body.",
)
def no_body_for_others(context: Context) -> None:
    encounter = Encounter(context)
    line = encounter.peer("dialler", shape=OTHER).dial(encounter.toy.info.address).greet(2)
    line.say(evolve(line.hello(3), facts=line.peer.layout.facts(), info=None, metadata={}))
    refused(line, Reason.LAYOUT)
    _no_body(context, line)
    facing, line = asked(encounter, "t", shape=OTHER)
    line.greet(3)
    _no_body(context, line)
    line.say(Hello(1, refusal=Reason.LAYOUT, detail="the models differ"))
    encounter.fails(facing.transfer, Reason.LAYOUT)
    encounter.over()


@case(
    "KVX-HEL-002",
    "proof-covers",
    "Proofs that are right but for one thing that they have to cover come from a dialler and from an acceptor: each "
    "is refused.",
)
def proof_covers(context: Context) -> None:
    for key in ("", SECRET):
        encounter = Encounter(context, key=key)
        peer = encounter.peer("dialler")
        for what in forgeries(peer.dial(encounter.toy.info.address)):
            line = peer.dial(encounter.toy.info.address).greet(2)
            line.say(line.hello(3, proof=forgeries(line)[what]()))
            _not_believed(context, line, what)
        for number, what in enumerate(forgeries(peer.dial(encounter.toy.info.address))):
            facing, line = asked(encounter, f"t-{number}")
            line.greet(1)
            line.say(line.hello(2, proof=forgeries(line)[what]()))
            _not_believed(context, line, what)
            encounter.fails(facing.transfer, Reason.AUTH)
        encounter.over()


def _not_believed(context: Context, line: Line, what: str) -> None:
    line.peer.until(lambda: line.ended or line.info is not None, "a forged proof is refused")
    context.check(line.info is None, f"a proof that does not cover {what} is accepted")
    refused(line, Reason.AUTH)


@case(
    "KVX-HEL-002",
    "reflected",
    "A dialler sends the acceptor's own proof back to it: it is refused.",
)
def reflected(context: Context) -> None:
    encounter = Encounter(context, key=SECRET)
    line = encounter.peer("mirror").dial(encounter.toy.info.address).greet(2)
    theirs = next(hello for hello in line.said(Hello) if hello.step == 2)
    line.say(line.hello(3, proof=theirs.proof))
    refused(line, Reason.AUTH)
    encounter.over()


@case(
    "KVX-HEL-003",
    "nonces",
    "The nonces of many connections, dialled and accepted, are 16 to 64 bytes long and all differ.",
)
def nonces(context: Context) -> None:
    encounter = Encounter(context)
    peer, seen = encounter.peer("dialler"), list[bytes]()
    for _ in range(12):
        seen.append(peer.dial(encounter.toy.info.address).greet(2).their_nonce)
    for number in range(4):
        facing, line = asked(encounter, f"t-{number}")
        seen.append(line.greet(1).their_nonce)
        line.close()
        encounter.fails(facing.transfer, Reason.PEER_LOST)
    context.check(all(16 <= len(nonce) <= 64 for nonce in seen), f"nonces of {sorted({len(n) for n in seen})} bytes")
    context.check(len(set(seen)) == len(seen), "two connections have the same nonce")
    encounter.over()


@case(
    "KVX-HEL-004",
    "no-echo",
    "A step 3 echoes another nonce than this connection's, with a proof that holds: the peer is not believed.",
)
def no_echo(context: Context) -> None:
    encounter = Encounter(context)
    line = encounter.peer("dialler").dial(encounter.toy.info.address).greet(2)
    line.say(line.hello(3, echo=secrets.token_bytes(16)))
    encounter.linger()
    context.check(line.info is None, "a peer is believed that has not echoed this connection's nonce")
    encounter.over()


@case(
    "KVX-HEL-004",
    "recorded",
    "All that a good peer said on its connection is said again, byte for byte, on another one, at every step of its "
    "transfers: it is not believed, and nothing acts.",
)
def recorded(context: Context) -> None:
    encounter = Encounter(context, key=SECRET)
    for facing in encounter.everywhere(*OPEN):
        tape = bytes(facing.line.sent)
        thief = facing.peer.dial(encounter.toy.info.address)
        thief.send(tape)
        encounter.linger()
        context.check(thief.info is None, "a recorded handshake is believed")
        thief.close()
        facing.line.barrier()
        facing.well()
    encounter.over()


@case(
    "KVX-HEL-004",
    "claimed-restart",
    "Somebody says Hello with another epoch of a peer and proves nothing, at every step of that peer's transfers: "
    "they go on.",
)
def claimed_restart(context: Context) -> None:
    encounter = Encounter(context, key=SECRET)
    for facing in encounter.everywhere(*OPEN):
        liar = encounter.peer(facing.peer.peer.instance, key=b"not the secret of the others")
        line = liar.dial(encounter.toy.info.address)
        line.say(line.hello(1, key_id=facing.line.hello(1).key_id))
        line.hear(Hello)
        line.say(line.hello(3))
        line.hang_up()
        facing.well()
    encounter.over()


@case(
    "KVX-HEL-005",
    "refusals",
    "A peer speaks no common version, or has no or another secret: it is answered with a refusal that says so, and "
    "the connection ends.",
)
def refusals(context: Context) -> None:
    encounter = Encounter(context, key=SECRET)
    wrong: list[tuple[dict[str, Any], Reason]] = [
        ({"versions": (2, 3)}, Reason.VERSION),
        ({"versions": ()}, Reason.VERSION),
        ({"key_id": ""}, Reason.AUTH),
        ({"key_id": "00000000"}, Reason.AUTH),
    ]
    peer = encounter.peer("dialler")
    for changes, reason in wrong:
        line = peer.dial(encounter.toy.info.address)
        line.say(line.hello(1, **changes))
        refused(line, reason)
    for number, (changes, reason) in enumerate(wrong):
        facing, line = asked(encounter, f"t-{number}")
        line.greet(1)
        line.say(line.hello(2, **changes))
        refused(line, reason)
        encounter.fails(facing.transfer, reason)
    encounter.over()


@case(
    "KVX-HEL-005",
    "refused",
    "A peer refuses the instance's Hello: the transfer fails for the reason that it gave, and nothing else changes.",
)
def is_refused(context: Context) -> None:
    encounter = Encounter(context)
    for number, reason in enumerate((Reason.AUTH, Reason.VERSION, Reason.LAYOUT)):
        facing, line = asked(encounter, f"t-{number}")
        line.greet(1)
        line.say(Hello(1, refusal=reason, detail="not with you"))
        encounter.fails(facing.transfer, reason)
    encounter.over()


@case(
    "KVX-HEL-006",
    "names-facts",
    "Peers differ from the instance in their model, or in their number of heads: the refusal names that fact.",
)
def names_facts(context: Context) -> None:
    encounter = Encounter(context)
    for number, (fact, shape) in enumerate((("model", OTHER), ("total_heads", Shape(block_size=16, heads=8)))):
        line = encounter.peer(f"dialler-{number}", shape=shape).dial(encounter.toy.info.address).greet(2)
        line.say(evolve(line.hello(3), facts=line.peer.layout.facts(), info=None, metadata={}))
        hello = refused(line, Reason.LAYOUT)
        context.check(fact in hello.detail, f"the refusal does not name {fact!r}: {hello.detail}")
    encounter.over()


@case(
    "KVX-HEL-007",
    "after-the-handshake",
    "Hello of every step comes once more, and with another epoch and nonce, on a proven connection, at every step of "
    "a transfer: nothing changes.",
)
def after(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        line = facing.line
        for step in (1, 2, 3, 4):
            line.say(line.hello(step))
            line.say(line.hello(step, epoch=facing.peer.epoch ^ 1, nonce=secrets.token_bytes(16)))
        line.barrier()
        facing.well()
    encounter.over()


@case(
    "KVX-HEL-007",
    "misplaced",
    "Steps come that this side never sends, or too early: they do not end or replace the handshake.",
)
def misplaced(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer("dialler")
    line = peer.dial(encounter.toy.info.address)
    for step in (2, 3, 4):
        line.say(line.hello(step, nonce=line.nonce, echo=secrets.token_bytes(16)))
    line.greet(2)
    line.say(line.hello(1, epoch=peer.epoch ^ 1, nonce=secrets.token_bytes(16)))
    line.say(line.hello(3))
    line.hear(Hello)
    context.check(line.info is not None, "a second first step has replaced the handshake")
    facing, line = asked(encounter, "t")
    line.greet(1)
    for step in (1, 3, 4):
        line.say(line.hello(step, nonce=line.nonce, echo=secrets.token_bytes(16)))
    line.say(line.hello(2))
    line.hear(Hello)
    context.check(line.info is not None, "misplaced steps have ended the handshake")
    # Before the handshake's last step: a peer that has been granted blocks would have to say Stopped.
    facing.abort()
    encounter.fails(facing.transfer, Reason.ABORTED)
    line.say(line.hello(4))
    encounter.over()


@case(
    "KVX-HEL-008",
    "stands-still",
    "The handshake stops after each of its steps, or comes byte by byte: the connection ends within `handshake_s`, "
    "and a transfer that waits for it fails.",
)
def stands_still(context: Context) -> None:
    bound_s = 0.4 * context.pace
    encounter = Encounter(context, handshake_s=bound_s)
    peer = encounter.peer("dialler")
    lines = [peer.dial(encounter.toy.info.address).greet(upto) for upto in (0, 1, 2)]
    slow = peer.dial(encounter.toy.info.address)
    frame = slow.bytes_of(slow.hello(1))
    drops = iter(len(frame).to_bytes(4) + frame)
    pending = [asked(encounter, f"t-{upto}") for upto in (0, 1)]
    pending[1][1].greet(1)
    end = time.monotonic() + 4 * bound_s
    while time.monotonic() < end and not slow.ended:
        slow.send(bytes([next(drops, 0)]))
        encounter.linger(bound_s / 20)
    context.check(slow.ended, "a handshake that comes byte by byte is waited for")
    for line in lines:
        line.hang_up()
    for facing, _ in pending:
        encounter.fails(facing.transfer, Reason.PEER_LOST)
    encounter.over()


@case(
    "KVX-HEL-009",
    "beyond-loopback",
    "Without a secret an instance is asked to listen on all addresses, and to dial one beyond loopback: it refuses "
    "the one and fails the other.",
)
def beyond_loopback(context: Context) -> None:
    encounter = Encounter(context)
    try:
        Toy.open(context, "open", "", 1, {"listen": "0.0.0.0:0", "advertise": "192.0.2.1:1"}).close()
    except KvxError:
        context.check(True, "")
    else:
        raise Finding("it listens on all addresses without a secret")
    mode = encounter.modes()[0]
    if mode is Mode.PUSH:
        encounter.toy.call("expose", "t", mode, address="192.0.2.1:5700", producer="somebody")
    else:
        peer = encounter.peer()
        grant = peer.grant("t", mode, peer.take(4), 60, address="192.0.2.1:5700")
        encounter.toy.call("stage", "t", mode, ticket=peer.ticket(grant), producer="somebody")
    outcome = encounter.fails("t", Reason.PEER_LOST)
    context.check("loopback" in outcome.detail, f"it is not said why: {outcome.detail}")
    encounter.over()


@case(
    "KVX-EPO-008",
    "parked",
    "Messages that name this epoch come between the steps of Hello: they act when the handshake has ended, not before.",
)
def parked(context: Context) -> None:
    encounter = Encounter(context)
    line = encounter.peer("early").dial(encounter.toy.info.address).greet(2)
    line.say(Renew(echo=True))
    line.say(Stopped("unheard", Reason.ABORTED))
    encounter.linger()
    context.check(not line.said(Renew), "a message acts before its sender is proven")
    line.say(line.hello(3))
    line.hear(Renew)
    context.check(line.said(Renew), "a parked message is lost")
    encounter.over()


@case(
    "KVX-HEL-004",
    "unproven-words",
    "Somebody who has said half a Hello sends words about open transfers, and never ends the handshake: none acts.",
)
def unproven_words(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(Step.EXPOSED, Step.MOVING):
        stranger = encounter.peer(facing.peer.peer.instance, epoch=facing.peer.epoch)
        line = stranger.dial(encounter.toy.info.address).greet(2)
        line.say(Stopped(facing.transfer, Reason.ABORTED))
        line.say(Renew(echo=True))
        encounter.linger()
        context.check(not line.said(Renew), "a message acts before its sender is proven")
        line.close()
        facing.well()
    encounter.over()
