"""Bytes of protocol version 1: envelopes, proofs and tickets.

An envelope is the msgpack array `[version, kind, from_epoch, to_epoch, body]`; a body is a map
of field names. Unknown fields and further array elements are ignored, so both can grow.
Whatever bytes come in, `decode` and `parse_ticket` raise RemoteProtocolError and nothing else:
msgspec reads every declared length against the bytes that are really there before it
allocates, the types carry the range of each field, and `_check` knows what types cannot say.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

import msgspec
from attrs import evolve

from kvx.core.errors import LocalProtocolError, RemoteProtocolError
from kvx.core.messages import (
    KINDS,
    Ack,
    Command,
    Done,
    Envelope,
    GrantMessage,
    Hello,
    Message,
    Renew,
    Revoke,
    Stopped,
)
from kvx.core.model import Count, Epoch, Grant, InstanceInfo, Layout, Mode, Ticket

VERSION = 1
VERSIONS = (1,)

MAX_FRAME = 16 << 20
"""Bytes of one envelope. A grant of MAX_BLOCKS block ids, five bytes each, takes a third of it."""
MAX_FRAME_UNPROVEN = 256 << 10
"""The same from a peer that has not proven itself: enough for the Hello with layout and metadata."""
MAX_TICKET = 4 << 20
"""Characters of a ticket. Routers copy it through JSON, so it stays far below a frame."""
MAX_GROUPS = 64
"""Cache groups of one layout; known models have at most a handful."""
MAX_LAYERS = 4096
"""Layers of one group, and layer names of one pipeline stage."""
MAX_BLOCKS = 1 << 20
"""Block ids in one grant: 16 million tokens in blocks of 16."""
MAX_LEGS = 4096
"""Ranks that one side may be told to hear from."""
MAX_RENEWED = 1 << 16
"""Transfers in one Renew."""
MAX_ENTRIES = 1024
"""Entries of the maps in Hello, and of its list of versions."""
MAX_DETAIL = 1024
"""Characters of a detail. It is for a log, so the sender cuts what is longer."""
PROOF_BYTES = 32

_TICKET_PREFIX = "kvx1."


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    version: Count
    kind: Count
    from_epoch: Epoch
    to_epoch: Epoch
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder(order="sorted")
_frames = msgspec.msgpack.Decoder(_Frame)
_bodies: dict[int, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()
}
_tickets = msgspec.msgpack.Decoder(Ticket)
_numbers: dict[type, int] = {cls: kind for kind, cls in KINDS.items()}


def encode(envelope: Envelope) -> bytes:
    """The envelope's bytes. Raises LocalProtocolError where it does not fit into a frame."""
    message = envelope.message
    if isinstance(message, Hello | Ack | Revoke | Stopped) and len(message.detail) > MAX_DETAIL:
        message = evolve(message, detail=message.detail[:MAX_DETAIL])
    head = (envelope.version, _numbers[type(message)], envelope.from_epoch, envelope.to_epoch)
    data = _pack((*head, message))
    if len(data) > MAX_FRAME:
        raise LocalProtocolError(f"{type(message).__name__} takes {len(data)} bytes, a frame holds {MAX_FRAME}")
    return data


def decode(data: bytes | bytearray | memoryview) -> Envelope:
    """The envelope in these bytes, which came from a peer. Raises RemoteProtocolError only."""
    if len(data) > MAX_FRAME:
        raise RemoteProtocolError(f"frame of {len(data)} bytes, {MAX_FRAME} are allowed")
    try:
        frame = _frames.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not an envelope: {error}") from error
    if frame.version not in VERSIONS:
        raise RemoteProtocolError(f"protocol version {frame.version}, this side speaks {VERSIONS}")
    if frame.kind not in _bodies:
        raise RemoteProtocolError(f"unknown kind of message: {frame.kind}")
    name = KINDS[frame.kind].__name__
    try:
        message = _bodies[frame.kind].decode(frame.body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"bad {name}: {error}") from error
    if fault := _check(message):
        raise RemoteProtocolError(f"bad {name}: {fault}")
    return Envelope(frame.version, frame.from_epoch, frame.to_epoch, message)


def key_id(key: bytes) -> str:
    """Name of a secret that may be shown: eight hex digits, empty for the empty key."""
    return hashlib.sha256(_joined(b"kvx key id 1", key)).hexdigest()[:8] if key else ""


def hello_proof(
    key: bytes,
    *,
    dialler: bool,
    own_epoch: int,
    own_nonce: bytes,
    peer_epoch: int,
    peer_nonce: bytes,
    fingerprint: str,
) -> bytes:
    """Proof that the sender of a Hello knows the secret, for this connection only.

    `dialler` and `own_*` are the prover's: whoever checks a proof gives the peer's as own. The
    direction is part of it, so no proof can be sent back to the one who made it.
    """
    side = b"dialler" if dialler else b"acceptor"
    return _mac(
        key,
        b"kvx hello 1",
        side,
        own_epoch.to_bytes(8),
        own_nonce,
        peer_epoch.to_bytes(8),
        peer_nonce,
        fingerprint.encode(),
    )


def command_proof(key: bytes, challenge: bytes, verb: str, argument: str, nonce: bytes) -> bytes:
    """Proof of a Command; `challenge` is the nonce that the acceptor sent in its Hello."""
    return _mac(key, b"kvx command 1", challenge, verb.encode(), argument.encode(), nonce)


def proof_holds(expected: bytes, given: bytes) -> bool:
    """Compare two proofs in a time that tells nothing of where they differ."""
    return hmac.compare_digest(expected, given)


def make_ticket(grant: Grant, key: bytes) -> Ticket:
    """Sign a pull grant. With the empty key anybody could have made it: for loopback only."""
    grant = evolve(grant, lease_s=float(grant.lease_s))
    return Ticket(grant, key_id(key), _ticket_mac(grant, key))


def ticket_holds(ticket: Ticket, key: bytes) -> bool:
    """Whether this ticket was made with this key and says what it said then."""
    return ticket.key_id == key_id(key) and proof_holds(_ticket_mac(ticket.grant, key), ticket.mac)


def ticket_text(ticket: Ticket) -> str:
    """A ticket as text for a request's transfer parameters: letters, digits, `-`, `_` and one dot."""
    return _TICKET_PREFIX + base64.urlsafe_b64encode(_pack(ticket)).rstrip(b"=").decode()


def parse_ticket(text: str) -> Ticket:
    """The ticket in this text. Raises RemoteProtocolError only; says nothing about its MAC."""
    if len(text) > MAX_TICKET:
        raise RemoteProtocolError(f"ticket of {len(text)} characters, {MAX_TICKET} are allowed")
    if not text.startswith(_TICKET_PREFIX):
        raise RemoteProtocolError(f"not a ticket: it does not start with {_TICKET_PREFIX!r}")
    code = text[len(_TICKET_PREFIX) :]
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars="-_", validate=True)
        ticket = _tickets.decode(data)
    except (binascii.Error, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a ticket: {error}") from error
    if ticket.grant.mode is not Mode.PULL:
        raise RemoteProtocolError("bad ticket: its grant is not for pull")
    if fault := _check_grant(ticket.grant):
        raise RemoteProtocolError(f"bad ticket: {fault}")
    return ticket


def _pack(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot be sent: {error}") from error


def _joined(*fields: bytes) -> bytes:
    """Fields with their lengths, so that no two lists of fields give the same bytes."""
    return b"".join(len(part).to_bytes(8) + part for part in fields)


def _mac(key: bytes, *fields: bytes) -> bytes:
    return hmac.digest(key, _joined(*fields), "sha256")


def _ticket_mac(grant: Grant, key: bytes) -> bytes:
    return _mac(key, b"kvx ticket 1", _pack(grant))


def _check(message: Message) -> str | None:
    """What is wrong with a message of well-typed fields, or None."""
    match message:
        case Hello():
            return _check_hello(message)
        case GrantMessage():
            if message.grant.mode is not Mode.PUSH:
                return "a grant for pull travels as a ticket"
            return _check_grant(message.grant) or _check_legs(message.legs)
        case Renew():
            return _at_most("transfers", message.transfers, MAX_RENEWED)
        case Done():
            return _at_most("groups", message.first, MAX_GROUPS) or _check_legs(message.legs)
        case Command():
            return _check_nonce("nonce", message.nonce) or _check_proof(message.proof)
        case Ack() | Revoke() | Stopped():
            return None


def _check_hello(hello: Hello) -> str | None:
    fault = (
        _at_most("versions", hello.versions, MAX_ENTRIES)
        or _at_most("facts", hello.facts, MAX_ENTRIES)
        or _at_most("transports", hello.metadata, MAX_ENTRIES)
        or _check_proof(hello.proof)
        or (_check_nonce("nonce", hello.nonce) if hello.nonce else None)
        or (_check_nonce("echo", hello.echo) if hello.echo else None)
    )
    if fault or hello.refusal:
        return fault
    if hello.step <= 2 and not hello.nonce:
        return f"step {hello.step} without a nonce"
    return _check_info(hello.info) if hello.info else None


def _check_info(info: InstanceInfo) -> str | None:
    layout = info.layout
    if info.rank != layout.rank:
        return f"rank {info.rank}, but its layout says {layout.rank}"
    if len(info.addresses) not in (0, layout.ranks):
        return f"{len(info.addresses)} addresses for {layout.ranks} ranks"
    return _at_most("transports", info.transports, MAX_ENTRIES) or _check_layout(layout)


def _check_layout(layout: Layout) -> str | None:
    for axis, rank, size in (
        ("tp", layout.tp_rank, layout.tp_size),
        ("pp", layout.pp_rank, layout.pp_size),
        ("dp", layout.dp_rank, layout.dp_size),
    ):
        if rank >= size:
            return f"{axis}_rank {rank} of {size}"
    if len(layout.stages) not in (0, layout.pp_size):
        return f"{len(layout.stages)} stages for pp_size {layout.pp_size}"
    if fault := _at_most("groups", layout.groups, MAX_GROUPS):
        return fault
    if [group.index for group in layout.groups] != list(range(len(layout.groups))):
        return "groups are not numbered from 0"
    lists: list[Sequence[object]] = [*layout.stages, *(group.layers for group in layout.groups)]
    return next((fault for each in lists if (fault := _at_most("layers", each, MAX_LAYERS))), None)


def _check_grant(grant: Grant) -> str | None:
    groups = grant.blocks.groups
    if len(grant.first) != len(groups):
        return f"{len(grant.first)} first positions for {len(groups)} groups"
    if len(grant.blocks) > MAX_BLOCKS:
        return f"{len(grant.blocks)} blocks, {MAX_BLOCKS} are allowed"
    return _at_most("groups", groups, MAX_GROUPS)


def _check_legs(legs: Sequence[int]) -> str | None:
    if len(set(legs)) != len(legs):
        return "a rank is named twice in legs"
    return _at_most("legs", legs, MAX_LEGS)


def _check_nonce(name: str, nonce: bytes) -> str | None:
    return None if 16 <= len(nonce) <= 64 else f"{name} of {len(nonce)} bytes"


def _check_proof(proof: bytes) -> str | None:
    return None if len(proof) in (0, PROOF_BYTES) else f"proof of {len(proof)} bytes"


def _at_most(name: str, items: Sequence[object] | dict[str, str] | dict[str, bytes], limit: int) -> str | None:
    return None if len(items) <= limit else f"{len(items)} {name}, {limit} are allowed"
