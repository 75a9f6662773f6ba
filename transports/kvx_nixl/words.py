"""What travels over the bell: eight kinds of frames, each a length and a msgpack array."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import struct
from enum import IntEnum
from typing import Annotated

import msgspec

from kvx.core.errors import RemoteProtocolError, TransportError
from kvx_nixl.agent import MAX_METADATA
from kvx_nixl.regions import MAX_REGIONS, Place

VERSION = 1
NONCE_BYTES = 16
MAX_STRANGE = 4096
"""Largest frame before the peer has proven itself."""
MAX_FRAME = MAX_METADATA + (4 << 20)
MAX_LANDED = 4096
"""Posts in one Landed."""

Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Status(IntEnum):
    """Why a connection is refused."""

    AUTH = 1
    STALE = 2
    VERSION = 3


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """The transport's metadata: where the bell is, and which start of the transport it belongs to."""

    version: int
    backend: Text
    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    incarnation: Token

    @classmethod
    def decode(cls, data: bytes, backend: str) -> Contact:
        """Raises TransportError for anything but valid metadata of this version and backend."""
        try:
            contact = msgspec.msgpack.decode(data, type=cls)
            ipaddress.ip_address(contact.host)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransportError(f"the peer's metadata cannot be used: {error}") from error
        if (contact.version, contact.backend) != (VERSION, backend):
            raise TransportError(
                f"the peer has {contact.backend} in version {contact.version}, this side {backend} in version {VERSION}"
            )
        return contact


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Dialler: who I am, and whom I expect."""

    version: int
    peer: Text
    incarnation: Token
    target: Text
    target_incarnation: Token
    nonce: Token


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2):
    nonce: Token


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Of the dialler, then of the acceptor."""

    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Believed only if its MAC is good."""

    status: int
    mac: Annotated[bytes, msgspec.Meta(max_length=32)]


class Introduce(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """My agent and my memory; from the dialler first, then from the acceptor."""

    agent: Text
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA)]
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    places: Annotated[list[Place], msgspec.Meta(max_length=MAX_REGIONS)]

    @classmethod
    def of(cls, agent: str, metadata: bytes, places: list[Place]) -> Introduce:
        return cls(agent, metadata, _digest(metadata), places)

    def check(self, peer: str, incarnation: bytes) -> None:
        """Raises RemoteProtocolError: damaged, or named like an agent of another process."""
        if not hmac.compare_digest(_digest(self.metadata), self.digest):
            raise RemoteProtocolError("the metadata of the peer's agent is damaged")
        if not self.agent.startswith(agents_of(peer, incarnation)):
            raise RemoteProtocolError(f"the peer's agent has a foreign name, {self.agent!r}")


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Acceptor: your agent is known here, or why it is not."""

    error: Text


class Ring(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Dialler: be awake (or not any more); what is below `floor` I do not ask for again."""

    awake: bool
    floor: Count


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Acceptor: these posts of a WRITE stand in my memory."""

    number: Count
    posts: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(max_length=MAX_LANDED)]


Word = Hello | Challenge | Proof | Refuse | Introduce | Ready | Ring | Landed

_decoder = msgspec.msgpack.Decoder(Word)
_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("!I")


def encode(word: Word) -> bytes:
    body = _encoder.encode(word)
    return _LENGTH.pack(len(body)) + body


def agents_of(peer: str, incarnation: bytes) -> str:
    """What the names of all agents of one start of a peer's transport begin with; no other start's do."""
    return f"{peer}/{incarnation.hex()}/"


def prove(secret: bytes, label: bytes, hello: Hello, challenge: bytes) -> bytes:
    """A MAC over both names, incarnations and nonces."""
    return hmac.digest(secret, label + challenge + _encoder.encode(hello), "sha256")


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()


class Reader:
    """Cuts a stream into words. Raises RemoteProtocolError for what is none, before it is stored."""

    def __init__(self) -> None:
        self.limit = MAX_STRANGE
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Word]:
        self._data += data
        words: list[Word] = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self.limit:
                raise RemoteProtocolError(f"a frame of {length} bytes, where {self.limit} are allowed")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            try:
                words.append(_decoder.decode(memoryview(self._data)[_LENGTH.size : end]))
            except (msgspec.DecodeError, ValueError) as error:
                raise RemoteProtocolError(f"not a word of this protocol: {error}") from error
            del self._data[:end]
        return words
