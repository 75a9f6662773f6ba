"""Cases of the sentences on envelopes and decoding: ENV, and what the golden vectors are good for."""

from __future__ import annotations

import socket
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec

from kvx.core import wire
from kvx.core.messages import Revoke, Stopped
from kvx.core.model import Mode, Reason, Side
from kvx_conformance.actor import JUNK
from kvx_conformance.suite.case import Context, case
from kvx_conformance.suite.encounter import Encounter, Step
from kvx_conformance.suite.line import Line
from kvx_conformance.suite.subject import Feature

VECTORS = Path(__file__).parent.parent / "vectors" / "v1"
OPEN = (Step.EXPOSED, Step.GRANTED, Step.MOVING, Step.SETTLING)


def bad_frames(line: Line) -> dict[str, bytes]:
    """Frames of known lengths that no receiver may take for an envelope of this version, by what is wrong."""
    good = line.bytes_of(Stopped("somebody-elses", Reason.OTHER))
    version, kind, mine, theirs, body = msgspec.msgpack.decode(good)

    def packed(*envelope: Any) -> bytes:
        return msgspec.msgpack.encode(envelope)

    return {
        "no bytes": b"",
        "no msgpack": b"\xc1" * 32,
        "a map": msgspec.msgpack.encode({"version": version, "kind": kind}),
        "too few elements": packed(version, kind, mine),
        "cut in the middle": good[: len(good) // 2],
        "another version": packed(2, kind, mine, theirs, body),
        "an unknown kind": packed(version, 99, mine, theirs, body),
        "a negative epoch": packed(version, kind, -1, theirs, body),
        "an epoch that is too large": packed(version, kind, 1 << 63, theirs, body),
        "a text as epoch": packed(version, kind, "mine", theirs, body),
        "a body that is an array": packed(version, kind, mine, theirs, ["somebody-elses", "other"]),
        "a missing field": packed(version, kind, mine, theirs, {"reason": "other"}),
        "an empty transfer id": packed(version, kind, mine, theirs, {**body, "transfer": ""}),
        "a transfer id that is too long": packed(version, kind, mine, theirs, {**body, "transfer": "x" * 129}),
        "a number as transfer id": packed(version, kind, mine, theirs, {**body, "transfer": 7}),
        "a detail that is too long": packed(version, kind, mine, theirs, {**body, "detail": "x" * 1025}),
        "a length beyond the frame": packed(version, kind, mine, theirs)[:-1] + b"\xdb\xff\xff\xff\xff",
        "a deep nest": b"\x91" * 5000,
        "a leg that is named twice": packed(
            version, 4, mine, theirs, {"transfer": "somebody-elses", "legs": [0, 0], "first": [0], "plan": ""}
        ),
    }


@case(
    "KVX-ENV-001",
    "too-long",
    "A peer announces a frame that is longer than its limit, before, in and after Hello, and sends none of it: the "
    "connection ends at once, and nothing else changes.",
)
def too_long(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer()
    for upto in (0, 1):
        line = peer.dial(encounter.toy.info.address).greet(upto)
        line.send((wire.MAX_FRAME_UNPROVEN + 1).to_bytes(4))
        line.hang_up()
    for facing in encounter.everywhere(*OPEN):
        facing.line.send((wire.MAX_FRAME + 1).to_bytes(4))
        facing.line.hang_up()
        facing.reconnect()
        facing.well()
    encounter.over()


@case(
    "KVX-ENV-002",
    "bad-frames",
    "A proven peer sends a frame that is no envelope, at every step of a transfer: its connection ends, and the "
    "transfer goes on over the next one.",
)
def malformed(context: Context) -> None:
    encounter = Encounter(context)
    names = cycle(bad_frames(encounter.peer().dial(encounter.toy.info.address)))
    for facing in encounter.everywhere(*OPEN):
        facing.line.frame(bad_frames(facing.line)[next(names)])
        facing.line.hang_up()
        facing.reconnect()
        facing.well()
    peer = encounter.peer("liar")
    for name in bad_frames(peer.dial(encounter.toy.info.address)):
        line = peer.dial(encounter.toy.info.address).greet()
        line.frame(bad_frames(line)[name])
        line.hang_up()
        context.check(line.ended, f"a frame with {name} does not end its connection")
    encounter.over()


@case(
    "KVX-ENV-002",
    "bad-strangers",
    "Somebody who has not said Hello sends a frame that is no envelope: the connection ends, and nothing else changes.",
)
def strangers(context: Context) -> None:
    encounter = Encounter(context)
    peer = encounter.peer()
    for upto in (0, 1):
        for name in bad_frames(peer.dial(encounter.toy.info.address)):
            line = peer.dial(encounter.toy.info.address).greet(upto)
            line.frame(bad_frames(line)[name])
            line.hang_up()
            context.check(line.ended, f"a frame with {name} does not end its connection")
    encounter.over()


@case(
    "KVX-ENV-002",
    "hostile-bytes",
    "Bytes of other protocols come to the listening socket, before and while something is moved: each such connection"
    " ends, and transfers are served.",
)
def hostile(context: Context) -> None:
    encounter = Encounter(context)
    _throw_junk(encounter)
    for facing in encounter.everywhere(Step.MOVING):
        _throw_junk(encounter)
        facing.well()
    encounter.over()


def _throw_junk(encounter: Encounter) -> None:
    peer = encounter.peer(f"stranger-{len(encounter.peers)}")
    for junk in JUNK:
        line = peer.dial(encounter.toy.info.address)
        line.send(junk)
        line.hang_up()


@case(
    "KVX-ENV-002",
    "truncated",
    "The stream ends in the middle of a frame, at every step of a transfer: nothing of the frame acts, and the "
    "transfer goes on over the next connection.",
)
def truncated(context: Context) -> None:
    encounter = Encounter(context)
    for facing in encounter.everywhere(*OPEN):
        word = Revoke if facing.side is Side.INITIATOR else Stopped
        frame = facing.line.bytes_of(word(facing.transfer, Reason.ABORTED))
        facing.line.send(len(frame).to_bytes(4) + frame[:-1])
        facing.line.sock.shutdown(socket.SHUT_WR)
        facing.line.hang_up()
        facing.reconnect()
        facing.well()
    encounter.over()


@case(
    "KVX-ENV-003",
    "unknown-fields",
    "A newer peer puts further fields into every body and further elements into every envelope: all transfers go well.",
)
def unknown_fields(context: Context) -> None:
    encounter = Encounter(context)
    for mode, side in encounter.roles():
        peer = encounter.peer(f"newer-{mode.value}-{side.value}")
        peer.newer = True
        encounter.facing(f"{mode.value}-{side.value}", mode, side, peer).well()
    encounter.over()


@case(
    "KVX-ENV-004",
    "unknown-reason",
    "A newer peer revokes a transfer for a reason that this version does not know: it fails with `other`.",
    needs=(Feature.WRITE,),
)
def unknown_reason(context: Context) -> None:
    encounter = Encounter(context)
    facing = encounter.facing("t", Mode.PUSH, Side.INITIATOR).to(Step.GRANTED)
    version, kind, mine, theirs, body = msgspec.msgpack.decode(facing.line.bytes_of(Revoke("t", Reason.OTHER)))
    facing.line.frame(msgspec.msgpack.encode([version, kind, mine, theirs, {**body, "reason": "sunspots"}]))
    facing.line.hear(Stopped, "t")
    facing.stage(0, 60)
    encounter.fails("t", Reason.OTHER)
    encounter.over()


@case(
    "KVX-EPO-002",
    "vectors",
    "The golden vectors of version 1, which name other epochs, come over a proven connection at every step: each is "
    "read, and none acts.",
)
def vectors(context: Context) -> None:
    encounter = Encounter(context)
    frames = {path.stem: path.read_bytes() for path in sorted(VECTORS.glob("*.bin"))}
    good = {name: data for name, data in frames.items() if name not in ("ticket", "hello-refusal", "command")}
    for facing in encounter.everywhere(*OPEN):
        for data in good.values():
            facing.line.frame(data)
        facing.line.barrier()
        context.check(not facing.line.ended, f"a vector of {sorted(good)} ends the connection")
        facing.well()
    encounter.over()
