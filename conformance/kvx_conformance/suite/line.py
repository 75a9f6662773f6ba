"""One control connection of a scripted peer: what it says goes out as the case wants it, what comes in is checked."""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from attrs import define, evolve, field

from kvx.core import wire
from kvx.core.errors import RemoteProtocolError
from kvx.core.messages import Envelope, GrantMessage, Hello, Message, Renew
from kvx.core.model import InstanceInfo, Layout, Peer
from kvx_conformance.suite.case import Context, Finding

SEND_S = 5.0
"""How long an instance may leave bytes unread."""
_HEADER = struct.Struct(">I")

M = TypeVar("M", bound=Message)
Until = Callable[[Callable[[], object], str], None]
"""Waits, serving everybody who takes part, until something holds. Raises Finding where it does not come to hold."""


class Speaker(Protocol):
    """Who speaks on a line."""

    until: Until
    context: Context
    peer: Peer
    epoch: int
    key: bytes
    layout: Layout
    polite: bool
    newer: bool

    @property
    def info(self) -> InstanceInfo: ...

    @property
    def metadata(self) -> dict[str, bytes]: ...


@define(eq=False)
class Line:
    """One control connection with the instance under test, dialled or accepted."""

    peer: Speaker
    sock: socket.socket
    dialler: bool
    nonce: bytes = field(factory=lambda: secrets.token_bytes(16))
    their_nonce: bytes = b""
    their_epoch: int = 0
    info: InstanceInfo | None = None
    """What the instance has told of itself; None before the handshake's end."""
    heard: list[Message] = field(factory=list)
    """All that came, in order, keepalives included."""
    sent: bytearray = field(factory=bytearray)
    """All that was said, as it went over the wire."""
    ended: bool = False
    """The instance has closed it."""
    _unread: deque[Message] = field(factory=deque)
    _came: bytearray = field(factory=bytearray)

    # ---------------------------------------------------------------------- saying

    def send(self, data: bytes) -> None:
        """Bytes as they are. What an instance that has hung up does not take is lost without a word."""
        self.sent += data
        try:
            self.sock.settimeout(SEND_S)
            self.sock.sendall(data)
        except OSError:
            self.ended = True

    def frame(self, data: bytes) -> None:
        """Bytes behind their length."""
        self.send(_HEADER.pack(len(data)) + data)

    def bytes_of(self, message: Message, *, from_epoch: int | None = None, to_epoch: int | None = None) -> bytes:
        """An envelope's bytes, with the true epochs unless others are given."""
        mine = self.peer.epoch if from_epoch is None else from_epoch
        data = wire.encode(Envelope(wire.VERSION, mine, self.their_epoch if to_epoch is None else to_epoch, message))
        return _newer(data) if self.peer.newer else data

    def say(self, message: Message, *, from_epoch: int | None = None, to_epoch: int | None = None) -> None:
        self.frame(self.bytes_of(message, from_epoch=from_epoch, to_epoch=to_epoch))

    def end_of_stream(self) -> None:
        """Nothing more comes from this side; the other direction stays open."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()
        self.ended = True

    # --------------------------------------------------------------------- hearing

    def serve(self) -> None:
        """Take what has come."""
        if self.ended:
            return
        self.sock.settimeout(0)
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self._came += data
        while len(self._came) >= _HEADER.size:
            end = _HEADER.size + int(_HEADER.unpack_from(self._came)[0])
            if end > _HEADER.size + wire.MAX_FRAME:
                raise Finding(f"the instance announces a frame of {end - _HEADER.size} bytes")
            if len(self._came) < end:
                break
            frame = bytes(self._came[_HEADER.size : end])
            del self._came[:end]
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        try:
            envelope = wire.decode(frame)
        except RemoteProtocolError as error:
            raise Finding(f"the instance sends what is no envelope: {error}: {frame[:40].hex()}") from error
        message = envelope.message
        if isinstance(message, Hello):
            self._meet(message)
        elif (envelope.from_epoch, envelope.to_epoch) not in (
            (self.their_epoch, self.peer.epoch),
            (self.their_epoch, 0),
        ):
            raise Finding(
                f"a {type(message).__name__} names the epochs {envelope.from_epoch} and {envelope.to_epoch}; "
                f"they are {self.their_epoch} and {self.peer.epoch}"
            )
        self.heard.append(message)
        if message == Renew(echo=True) and self.peer.polite:
            self.say(Renew())
        else:
            self._unread.append(message)

    def _meet(self, hello: Hello) -> None:
        if hello.step in (1, 2) and hello.refusal is None:
            self.their_nonce, self.their_epoch = hello.nonce, hello.epoch
        if hello.info is not None:
            self.info = hello.info

    def next(self, kind: type[M], transfer: str | None = None) -> M | None:
        """The first message of this kind that has come and was not taken; those before it are passed over."""
        for at, message in enumerate(self._unread):
            if isinstance(message, kind) and (transfer is None or _about(message, transfer)):
                for _ in range(at + 1):
                    self._unread.popleft()
                return message
        return None

    def hear(self, kind: type[M], transfer: str | None = None) -> M:
        """The same, and wait for it. Raises Finding if it does not come."""
        found: list[M] = []

        def came() -> bool:
            message = self.next(kind, transfer)
            if message is not None:
                found.append(message)
            return bool(found) or self.ended

        about = f" for {transfer}" if transfer else ""
        self.peer.until(came, f"a {kind.__name__}{about} comes from the instance")
        if not found:
            raise Finding(f"the instance hung up before a {kind.__name__}{about}; it said: {self.story()}")
        return found[0]

    def hang_up(self) -> None:
        """Wait until the instance has closed the line."""
        self.peer.until(lambda: self.ended, "the instance ends the connection")

    def barrier(self) -> None:
        """Wait until all that was said on this line has acted: frames of one line act in order."""
        self.say(Renew(echo=True))
        self.peer.until(self._passed, "a Renew with `echo` is answered")

    def _passed(self) -> bool:
        if Renew() in self._unread:
            self._unread.remove(Renew())
            return True
        return self.ended

    def said(self, kind: type[M], transfer: str | None = None) -> list[M]:
        """Everything of this kind that has ever come."""
        return [m for m in self.heard if isinstance(m, kind) and (transfer is None or _about(m, transfer))]

    @property
    def pings(self) -> int:
        """Keepalives that have come."""
        return self.heard.count(Renew(echo=True))

    def story(self) -> str:
        return ", ".join(type(message).__name__ for message in self.heard[-12:]) or "nothing"

    # ------------------------------------------------------------------- who is who

    def hello(self, step: int, **changes: Any) -> Hello:
        """The Hello of one step as it has to be, but for `changes`."""
        peer, print_ = self.peer, self.peer.layout.fingerprint()
        first, body = step in (1, 2), step in (3, 4)
        hello = Hello(
            step=step,
            versions=wire.VERSIONS if first else (),
            epoch=peer.epoch if first else 0,
            nonce=self.nonce if first else b"",
            key_id=wire.key_id(peer.key) if first else "",
            echo=self.their_nonce if step > 1 else b"",
            proof=self.proof() if step in (2, 3) else b"",
            fingerprint=print_ if step in (2, 3) else "",
            info=peer.info if body else None,
            metadata=peer.metadata if body else {},
        )
        return evolve(hello, **changes)

    def proof(self, **changes: Any) -> bytes:
        """This side's proof, but for `changes` in what it covers."""
        covers: dict[str, Any] = {
            "dialler": self.dialler,
            "own_epoch": self.peer.epoch,
            "own_nonce": self.nonce,
            "peer_epoch": self.their_epoch,
            "peer_nonce": self.their_nonce,
            "fingerprint": self.peer.layout.fingerprint(),
            **changes,
        }
        return wire.hello_proof(covers.pop("key", self.peer.key), **covers)

    def greet(self, upto: int = 4) -> Line:
        """The handshake, up to and with this step, as it has to be."""
        for step in range(1, upto + 1):
            if self.dialler == (step in (1, 3)):
                self.say(self.hello(step), to_epoch=self.their_epoch)
                continue
            got = self.hear(Hello)
            if got.refusal is not None or got.step != step:
                raise Finding(f"step {step} of Hello is due, but step {got.step} came ({got.refusal}: {got.detail})")
            if step in (2, 3) and not wire.proof_holds(self._due_proof(got), got.proof):
                raise Finding(f"the instance's proof in step {step} does not hold")
            if step > 1 and got.echo != self.nonce:
                raise Finding(f"step {step} does not echo this connection's nonce")
        return self

    def _due_proof(self, got: Hello) -> bytes:
        return wire.hello_proof(
            self.peer.key,
            dialler=not self.dialler,
            own_epoch=self.their_epoch,
            own_nonce=self.their_nonce,
            peer_epoch=self.peer.epoch,
            peer_nonce=self.nonce,
            fingerprint=got.fingerprint,
        )


def _newer(data: bytes) -> bytes:
    """The same envelope as a later version might send it: with fields and elements that are not known yet."""
    *head, body = msgspec.msgpack.decode(data)
    more = {"zone": "b", "weights": [1, 2.5, None], "a": {"nested": True}}
    return msgspec.msgpack.encode([*head, {**body, **more}, "later", {"more": 1}])


def _about(message: Message, transfer: str) -> bool:
    if isinstance(message, GrantMessage):
        return message.grant.transfer == transfer
    return transfer in getattr(message, "transfers", (getattr(message, "transfer", None),))
