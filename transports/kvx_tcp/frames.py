"""The wire of kvx_tcp: frames of one fixed header, little-endian, and what may follow it.

A connection carries the operations of the side that dialled it. The dialler sends OPEN (the
whole table of an operation's remote ranges, checked before any byte of it is taken), then PUT
with bytes or GET for bytes, one chunk each; the acceptor answers each of them in order with
ACK, a good GET with DATA before it. PUT and GET name bytes by their place in the table, never by
address. CLOSE forgets an operation. ABANDON, on a new connection, ends an older one that broke:
its ACK proves that nothing more of it can land.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvx.core.errors import RemoteProtocolError
from kvx.core.model import Descriptors, Op, Reason, Stamp

MAGIC = 0x564B
VERSION = 1
MAX_CHUNK = 32 << 20
MAX_PIECES = 1 << 20
MAX_PIECE_BYTES = 1 << 40
_HEADER = struct.Struct("<HBBHHQQQ")
_OPEN = struct.Struct("<QQBBHI")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    OPEN = 6
    PUT = 7
    GET = 8
    DATA = 9
    ACK = 10
    CLOSE = 11
    ABANDON = 12


BODY_LIMIT = {
    Kind.HELLO: 4096,
    Kind.CHALLENGE: 64,
    Kind.PROOF: 64,
    Kind.WELCOME: 64,
    Kind.REFUSE: 1024,
    Kind.OPEN: _OPEN.size + 512 + 24 * MAX_PIECES,
    Kind.ABANDON: 16,
}
"""Kinds whose header is followed by `length` bytes of structure, and how many there may be."""
PAYLOAD = frozenset({Kind.PUT, Kind.DATA})
"""Kinds whose header is followed by `length` bytes of registered memory."""


class Status(IntEnum):
    """How an ACK or REFUSE ends what it answers."""

    OK = 0
    UNKNOWN = 1
    BOUNDS = 2
    STALE = 3
    CAPACITY = 4
    FORBIDDEN = 5
    AUTH = 6
    OTHER = 7

    @classmethod
    def _missing_(cls, value: object) -> Status:
        return cls.OTHER

    @property
    def reason(self) -> Reason:
        return _REASONS[self][0]

    @property
    def text(self) -> str:
        return _REASONS[self][1]


_REASONS = {
    Status.OK: (Reason.OTHER, "accepted"),
    Status.UNKNOWN: (Reason.UNKNOWN_TRANSFER, "the target permits nothing to this transfer"),
    Status.BOUNDS: (Reason.BOUNDS, "a range lies outside of what the target permitted"),
    Status.STALE: (Reason.EPOCH, "the target's epoch or generation is another one"),
    Status.CAPACITY: (Reason.NO_CAPACITY, "the target has too many open operations"),
    Status.FORBIDDEN: (Reason.ABORTED, "the target has taken its permission back"),
    Status.AUTH: (Reason.AUTH, "the target does not accept who this is"),
    Status.OTHER: (Reason.OTHER, "the target refused"),
}


class Frame(NamedTuple):
    """One header. `length` counts what follows (PUT, DATA and structures) or what is meant (GET, ACK)."""

    kind: Kind
    status: int = 0
    op: int = 0
    offset: int = 0
    length: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.kind, self.status, 0, self.op, self.offset, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Raises RemoteProtocolError for anything but a header of this version within its limits."""
        magic, version, kind, status, zero, op, offset, length = _HEADER.unpack(data)
        if magic != MAGIC or version != VERSION or zero:
            raise RemoteProtocolError(f"not a frame of version {VERSION}")
        try:
            frame = cls(Kind(kind), status, op, offset, length)
        except ValueError:
            raise RemoteProtocolError(f"frame of an unknown kind {kind}") from None
        limit = BODY_LIMIT.get(frame.kind, MAX_CHUNK)
        if length > limit:
            raise RemoteProtocolError(f"{frame.kind.name} of {length} bytes; {limit} are allowed")
        if frame.kind in (Kind.PUT, Kind.GET, Kind.DATA) and not length:
            raise RemoteProtocolError(f"{frame.kind.name} of no bytes")
        return frame


def message(kind: Kind, body: bytes, status: int = 0, op: int = 0) -> bytes:
    """A header with its structure."""
    return Frame(kind, status, op, 0, len(body)).encode() + body


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a dialler: who it is, whom it means, and the connection group it belongs to.

    `incarnation` names one start of the dialler's transport, `target_incarnation` the acceptor's.
    """

    name: Annotated[str, msgspec.Meta(max_length=300)]
    target: Annotated[str, msgspec.Meta(max_length=300)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    target_incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    group: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    def encode(self) -> bytes:
        return message(Kind.HELLO, msgspec.msgpack.encode(self))

    @classmethod
    def decode(cls, body: bytes | bytearray) -> Hello:
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"HELLO cannot be read: {error}") from error


def prove(secret: bytes, label: bytes, hello: Hello, challenge: bytes) -> bytes:
    """HMAC-SHA256 over everything that was said; `label` tells the two directions apart."""
    return hmac.new(secret, label + challenge + msgspec.msgpack.encode(hello), hashlib.sha256).digest()


def encode_open(op_id: int, op: Op, stamp: Stamp, remote: Descriptors) -> bytes:
    """OPEN; the table is region, offset and length as three arrays of int64."""
    transfer = stamp.transfer.encode()
    head = _OPEN.pack(stamp.epoch, stamp.generation, op is Op.WRITE, 0, len(transfer), len(remote))
    columns = (remote.region, remote.offset, remote.length)
    return message(Kind.OPEN, b"".join((head, transfer, *(c.astype("<i8").tobytes() for c in columns))), 0, op_id)


def decode_open(body: bytes | bytearray) -> tuple[Op, Stamp, Descriptors]:
    """Raises RemoteProtocolError. Bounds of the pieces are the caller's to check; their sum fits an int64."""
    if len(body) < _OPEN.size:
        raise RemoteProtocolError("OPEN is too short")
    epoch, generation, write, zero, letters, count = _OPEN.unpack_from(body)
    if write > 1 or zero or count > MAX_PIECES or len(body) != _OPEN.size + letters + 24 * count:
        raise RemoteProtocolError("OPEN's length is not that of its table")
    try:
        transfer = bytes(body[_OPEN.size : _OPEN.size + letters]).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("OPEN names a transfer that is not text") from error
    table = np.frombuffer(body, dtype="<i8", offset=_OPEN.size + letters).reshape(3, count).astype(np.int64)
    if count and (table.min() < 0 or table.max() > MAX_PIECE_BYTES or not table[2].all()):
        raise RemoteProtocolError("OPEN has an empty, negative or absurd piece")
    return Op.WRITE if write else Op.READ, Stamp(transfer, epoch, generation), Descriptors(*table)
