"""The scripted peer: speaks wire version 1 over plain sockets and does what a case says, lies included.

There is no endpoint in it and no state of the protocol: nothing is answered but keepalives, and those only
while the peer is `polite`. Its bytes move by a transport of the subject's, driven by hand. Whatever the
instance under test says is decoded and checked as it comes: a frame that is no envelope, or names epochs
that cannot be, is a Finding.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
from attrs import define, evolve, field

from kvx.core import wire
from kvx.core.errors import RemoteProtocolError
from kvx.core.events import OpDone, OpFailed
from kvx.core.layout import LegPlan, plan_leg
from kvx.core.messages import Done, Envelope, GrantMessage, Hello, Message, Renew
from kvx.core.model import (
    BlockTable,
    Descriptors,
    Grant,
    InstanceInfo,
    Mode,
    Op,
    Part,
    Peer,
    Region,
    Role,
    Stamp,
    Ticket,
)
from kvx.transport import Transport
from kvx_conformance.actor import Shape
from kvx_conformance.suite.case import Context, Finding
from kvx_conformance.toy import Cache

SHAPE = Shape(block_size=16)
"""Four heads, three layers, 24 blocks of 16 tokens: 256 bytes of each layer in a block."""
_HEADER = struct.Struct(">I")
_SEND_S = 5.0

M = TypeVar("M", bound=Message)
Until = Callable[[Callable[[], object], str], None]
"""Waits, serving everybody who takes part, until something holds. Raises Finding where it does not come to hold."""


def guarded(who: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call what is under test. Whatever it raises is a Finding that names the call."""
    try:
        return call(*arguments, **named)
    except Exception as error:
        name = getattr(call, "__name__", "call")
        raise Finding(f"{who}: `{name}` raised {type(error).__name__}: {error}") from error


def region_of(cache: Cache) -> Region:
    """The whole cache as the one region that its layout speaks of."""
    memory = np.frombuffer(cache.memory, dtype=np.uint8)
    return Region(0, memory.ctypes.data, memory.nbytes)


@define(eq=False)
class Line:
    """One control connection with the instance under test, dialled or accepted."""

    peer: ScriptedPeer
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
            self.sock.settimeout(_SEND_S)
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


class ScriptedPeer:
    """One rank that is written by the case. It listens; lines to and from it are in `lines`.

    `until` is the wait of the encounter that it belongs to.
    """

    def __init__(
        self,
        context: Context,
        until: Until,
        name: str,
        *,
        shape: Shape = SHAPE,
        rank: int = 0,
        epoch: int | None = None,
        key: bytes = b"",
    ) -> None:
        self.until = until
        self.peer = Peer(name, rank)
        self.layout = shape.layout(rank)
        self.epoch = secrets.randbits(63) if epoch is None else epoch
        self.key = key
        self.polite = True
        """Answers keepalives."""
        self.newer = False
        """Speaks as a later version might."""
        self.cache = Cache(self.layout)
        self.lines: list[Line] = []
        self.context = context
        self._shape = shape
        self._listener = context.enter(socket.create_server(("127.0.0.1", 0), backlog=16))
        self._listener.settimeout(0)
        self._accepted: deque[Line] = deque()
        self._transport: Transport | None = None
        self._next_op = 1
        self._ended: dict[int, OpDone | OpFailed] = {}
        self._next_block = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def info(self) -> InstanceInfo:
        mine = (self.peer.instance, self.peer.rank, self.epoch, self.address)
        addresses = (self.address,) * self.layout.ranks
        return InstanceInfo(*mine, self.layout, (self.context.subject.transport,), addresses)

    @property
    def metadata(self) -> dict[str, bytes]:
        return {self.context.subject.transport: guarded("transport", self.transport.metadata)}

    @property
    def transport(self) -> Transport:
        """Its data plane, made when it is first needed."""
        if self._transport is None:
            section: dict[str, Any] = {"secret": self.key} if self.key else {}
            made: Transport = guarded("transport", self.context.subject.make_transport, str(self.peer), **section)
            self.context.enter(closing(made))
            guarded("transport", made.register, [region_of(self.cache)])
            self._transport = made
            return made
        return self._transport

    def stop_listening(self) -> None:
        """Whoever dials it is refused from now on."""
        self._listener.close()

    def restart(self) -> None:
        """Another start of the same instance: a new epoch, no lines, nothing remembered, the same address."""
        for line in self.lines:
            line.close()
        self.lines.clear()
        self._accepted.clear()
        if self._transport is not None:
            guarded("transport", self._transport.close)
            self._transport = None
        self.epoch = secrets.randbits(63)

    # ----------------------------------------------------------------------- lines

    def dial(self, address: str) -> Line:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_SEND_S)
        except OSError as error:
            raise Finding(f"nobody listens at the instance's own address {address}: {error}") from error
        return self._line(sock, dialler=True)

    def accept(self) -> Line:
        """The next line that the instance opens. Raises Finding if it opens none."""
        self.until(lambda: self._accepted, f"the instance dials {self.peer} at {self.address}")
        return self._accepted.popleft()

    @property
    def dialled(self) -> bool:
        """The instance has opened a line that was not taken yet."""
        return bool(self._accepted)

    def _line(self, sock: socket.socket, *, dialler: bool) -> Line:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(self, self.context.enter(sock), dialler)
        self.lines.append(line)
        return line

    def serve(self) -> None:
        """Take what has come on all lines, and let the transport move bytes."""
        with suppress(BlockingIOError, ValueError, OSError):
            self._accepted.append(self._line(self._listener.accept()[0], dialler=False))
        for line in self.lines:
            line.serve()
        if self._transport is not None:
            for one in guarded("transport", self._transport.poll):
                if isinstance(one, OpDone | OpFailed):
                    self._ended[one.op_id] = one

    # ----------------------------------------------------------------------- words

    def take(self, count: int) -> BlockTable:
        """So many blocks of its own, poisoned; those that were taken first come again in the end."""
        first = self._next_block if self._next_block + count <= self.layout.num_blocks else 0
        self._next_block = first + count
        self.cache.poison(range(first, first + count))
        return BlockTable.of(reversed(range(first, first + count)))

    def plan(self, theirs: InstanceInfo, role: Role) -> LegPlan:
        """The leg between this rank in `role` and the instance's."""
        order = (self.layout, theirs.layout) if role is Role.PRODUCER else (theirs.layout, self.layout)
        return plan_leg(*order)

    def grant(self, transfer: str, mode: Mode, blocks: BlockTable, tokens: int, **changes: Any) -> Grant:
        """A grant for blocks of this peer from position 0 on, but for `changes`."""
        grant = Grant(transfer, self.peer, self.epoch, 0, mode, (0,), blocks, tokens, 60.0, self.address)
        return evolve(grant, **changes)

    def ticket(self, grant: Grant) -> Ticket:
        return wire.make_ticket(grant, self.key)

    def granting(self, grant: Grant, theirs: InstanceInfo, **changes: Any) -> GrantMessage:
        """The message that hands a grant to a producer."""
        return evolve(GrantMessage(grant, (0,), self.plan(theirs, Role.CONSUMER).digest), **changes)

    def done(self, transfer: str, theirs: InstanceInfo, role: Role, **changes: Any) -> Done:
        """That all of a transfer of whole prompts has moved."""
        return evolve(Done(transfer, (0,), (0,), self.plan(theirs, role).digest), **changes)

    # ------------------------------------------------------------------------ bytes

    def permit(self, grant: Grant, theirs: InstanceInfo) -> None:
        """Let the instance write to, or read from, the blocks of this grant."""
        role = Role.CONSUMER if grant.mode is Mode.PUSH else Role.PRODUCER
        ranges = self.plan(theirs, role).ranges(role, Part(None, grant.first, grant.blocks))
        peer = theirs.peer if grant.mode is Mode.PUSH else None
        stamp = Stamp(grant.transfer, self.epoch, grant.generation)
        guarded("transport", self.transport.permit, grant.transfer, peer, grant.op, ranges, stamp)

    def learn(self, line: Line) -> InstanceInfo:
        """Tell the transport of the instance, from its body in Hello; returns who it is."""
        body = next((m for m in reversed(line.heard) if isinstance(m, Hello) and m.info is not None), None)
        if body is None or body.info is None:
            raise Finding("the instance has not sent its body")
        name = self.context.subject.transport
        if name not in body.metadata:
            raise Finding(f"the instance's body has no metadata of transport {name!r}")
        guarded("transport", self.transport.connect, body.info, body.metadata[name])
        return body.info

    def move(
        self, theirs: InstanceInfo, op: Op, mine: Part, other: Part, stamp: Stamp
    ) -> Callable[[], OpDone | OpFailed | None]:
        """Post the operation that fills `other` (or `mine`, for a READ); the answer tells how it ended, if it has."""
        role = Role.PRODUCER if op is Op.WRITE else Role.CONSUMER
        plan = self.plan(theirs, role)
        local: Descriptors
        remote: Descriptors
        if role is Role.PRODUCER:
            local, remote = plan.move(mine, other)
        else:
            remote, local = plan.move(other, mine)
        op_id, self._next_op = self._next_op, self._next_op + 1
        guarded("transport", self.transport.post, op_id, theirs.peer, op, local, remote, stamp)
        return lambda: self._ended.get(op_id)

    def moved(self, theirs: InstanceInfo, op: Op, mine: Part, other: Part, stamp: Stamp) -> OpDone | OpFailed:
        """The same, and wait for its end."""
        end = self.move(theirs, op, mine, other, stamp)
        self.until(lambda: end() is not None, f"a {op.value} of the scripted peer ends")
        ended = end()
        assert ended is not None
        return ended
