"""The scripted peer: speaks wire version 1 over plain sockets and does what a case says, lies included.

There is no endpoint in it and no state of the protocol: nothing is answered but keepalives, and those only
while the peer is `polite`. Its bytes move by a transport of the subject's, driven by hand. Whatever the
instance under test says is decoded and checked as it comes: a frame that is no envelope, or names epochs
that cannot be, is a Finding.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import numpy as np
from attrs import evolve

from kvx.core import wire
from kvx.core.events import OpDone, OpFailed
from kvx.core.layout import LegPlan, plan_leg
from kvx.core.messages import Done, GrantMessage, Hello
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
from kvx_conformance.suite.line import SEND_S, Line, Until
from kvx_conformance.toy import Cache

SHAPE = Shape(block_size=16)
"""Four heads, three layers, 24 blocks of 16 tokens: 256 bytes of each layer in a block."""


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
        self.moving = True
        """Its transport is polled."""
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
            sock = socket.create_connection((host, int(port)), timeout=SEND_S)
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
        if self._transport is not None and self.moving:
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
