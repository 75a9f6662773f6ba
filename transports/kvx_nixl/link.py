"""The side that posts operations: one link for each known peer, its bell, and what becomes of operations in doubt.

An operation that NIXL fails after some of it was posted may still be moving. It stays in flight
until one of these shows that it is quiet (R14): a WRITE, that every post of it has landed, or that
the peer's process is gone; a READ, that our own agent is destroyed, or that the peer is gone and
what its sockets held has been taken.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from attrs import define, field

from kvx.core.errors import RemoteProtocolError, TransportError
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, Op, Peer, Reason
from kvx_nixl.bell import Connection, RefusedError
from kvx_nixl.moves import Move
from kvx_nixl.regions import Regions
from kvx_nixl.words import Contact, Introduce, Landed, Ready, Ring, Word
from kvx_nixl.worker import Worker

_log = logging.getLogger(__name__)
MAX_IN_FLIGHT = 64
"""Operations to one peer; the rest waits in order."""
_MAX_PAUSE_S = 2.0
_RING_S = 0.1
"""How often a peer is rung while something is in flight to it."""
SETTLE_S = 0.5
"""How long the sockets of a dead peer are still read."""
DOUBT_S = 1.0
"""After so long in doubt our agent is replaced: a READ ends with the old one, and the link works again."""


@define(eq=False)
class Operation:
    """One post of the endpoint."""

    op_id: int
    number: int
    op: Op
    local: Descriptors = field(repr=False)
    remote: Descriptors = field(repr=False)
    nbytes: int
    posted_at: float = field(factory=time.monotonic)
    cancelled: bool = False
    tried: bool = False
    """It has been refused once, before anything of it had begun."""
    move: Move | None = None
    """What the worker has of it; None: nothing of it has begun."""
    worker: Worker | None = None
    forsaken: bool = False
    """The process that it was posted to is gone, or may be: it counts as failed, whatever NIXL says."""
    ended: bool = False
    """NIXL has ended what it will of it."""
    ended_at: float = 0.0
    landed: set[int] = field(factory=set)

    @property
    def quiet(self) -> bool:
        """Can nothing of it move any more, whatever else happens?"""
        if self.move is None:
            return True
        if not self.ended:
            return False
        if self.op is Op.WRITE:
            return len(self.landed) >= self.move.posted
        return not self.move.error or not self.move.posted

    @property
    def completion(self) -> OpDone | OpFailed:
        """How it has ended, once it is quiet."""
        move = self.move
        if move is not None and self.ended and move.complete and self._well(move) and not self.forsaken:
            return OpDone(self.op_id, self.nbytes)
        if self.cancelled:
            return OpFailed(self.op_id, Reason.ABORTED, "cancelled")
        error = "" if move is None else move.error
        return OpFailed(self.op_id, Reason.TRANSPORT, error or "the peer was lost before it had ended")

    @property
    def doubtful(self) -> bool:
        """Has it failed, and may still be moving?"""
        return self.ended and self.move is not None and bool(self.move.error)

    def _well(self, move: Move) -> bool:
        return len(self.landed) == move.posted if self.op is Op.WRITE else not move.error


class Shell(Protocol):
    """What the transport does for its links."""

    regions: Regions

    @property
    def worker(self) -> Worker | None:
        """The one that takes new operations; None: it is not ready."""

    def dial(self, link: Link) -> Connection:
        """Raises OSError."""

    def drop(self, connection: Connection) -> None: ...

    def watch(self, connection: Connection) -> None:
        """Its `wanted` or `deadline` may have changed."""

    def introduction(self) -> Introduce: ...

    def learn(self, link: Link, name: str, metadata: bytes) -> None:
        """Add a peer's agent; `link.learnt` is called."""

    def report(self, completion: OpDone | OpFailed) -> None: ...


@define(eq=False)
class Link:
    """One known peer. Every method belongs to the runtime's thread."""

    peer: Peer
    epoch: int
    contact: Contact
    shell: Shell
    handshake_s: float
    connection: Connection | None = None
    waiting: list[Operation] = field(factory=list)
    flying: dict[int, Operation] = field(factory=dict)
    agent: str = ""
    refused: bool = False
    """Our agent has refused to post what is within bounds: measured of LIBFABRIC, after another peer's death."""
    gone_since: float | None = None
    """Since when the peer's process is proven gone."""
    _regions: Regions | None = None
    _learnt: bool = False
    _answered: bool = False
    _redial_at: float = 0.0
    _pause_s: float = 0.0
    _rung_at: float = 0.0

    @property
    def ready(self) -> bool:
        return self.connection is not None and self._learnt and self._answered

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.flying

    # ------------------------------------------------------------ operations

    def post(self, operation: Operation) -> None:
        self.waiting.append(operation)
        self.go_on()

    def go_on(self) -> None:
        """Start what waits, or dial for it."""
        worker = self.shell.worker
        if worker is None or self.idle or self.gone_since is not None:
            return
        if self.connection is None:
            if time.monotonic() >= self._redial_at:
                self._dial()
            return
        if not self.ready:
            return
        room = MAX_IN_FLIGHT - sum(not operation.doubtful for operation in self.flying.values())
        started, self.waiting = self.waiting[: max(0, room)], self.waiting[max(0, room) :]
        if started and not self.flying:
            self.ring(awake=True)
        for operation in started:
            self._start(worker, operation)

    def _start(self, worker: Worker, operation: Operation) -> None:
        assert self._regions is not None
        try:
            local, local_vram = self.shell.regions.locate(operation.local)
            remote, remote_vram = self._regions.locate(operation.remote)
        except TransportError as error:
            self.shell.report(OpFailed(operation.op_id, Reason.BOUNDS, str(error)))
            return
        operation.worker = worker
        operation.move = Move(
            operation.op_id,
            operation.number,
            operation.op,
            self.agent,
            local,
            remote,
            local_vram,
            remote_vram,
            operation.nbytes,
        )
        self.flying[operation.number] = operation
        worker.start(operation.move)

    def cancel(self, op_id: int) -> None:
        for operation in self.waiting:
            if operation.op_id == op_id:
                self.waiting.remove(operation)
                self.shell.report(OpFailed(op_id, Reason.ABORTED, "cancelled before it was posted"))
                return
        for operation in self.flying.values():
            if operation.op_id == op_id and operation.move is not None:
                operation.cancelled = operation.move.stopped = True

    def moved(self, move: Move) -> None:
        """NIXL has ended what it will of this operation."""
        operation = self.flying.get(move.number)
        if operation is None:
            return
        if move.error:
            _log.warning("operation %d to %s: %s", operation.op_id, self.peer, move.error)
        if move.error and not move.posted and self.ready and not operation.tried and not operation.cancelled:
            del self.flying[operation.number]
            operation.tried, operation.move, operation.worker = True, None, None
            self.waiting.insert(0, operation)
            self.refused = True
            return
        operation.ended, operation.ended_at = True, time.monotonic()
        self._conclude(operation)

    def closed(self, worker: Worker) -> None:
        """This agent of ours is destroyed: READs that it had cannot write here any more."""
        for operation in list(self.flying.values()):
            if operation.worker is worker and operation.op is Op.READ:
                self._end(operation)

    def _conclude(self, operation: Operation) -> None:
        if operation.quiet:
            self._end(operation)

    def _end(self, operation: Operation) -> None:
        del self.flying[operation.number]
        self.shell.report(operation.completion)
        if self.waiting:
            self.go_on()
        elif not self.flying and self.ready:
            self.ring(awake=False)

    def ring(self, *, awake: bool) -> None:
        if self.connection is not None:
            self._rung_at = time.monotonic()
            floor = min(self.flying, default=0)
            self.connection.send(Ring(awake, floor))
            self.shell.watch(self.connection)

    # ------------------------------------------------------------ the bell

    def _dial(self) -> None:
        try:
            self.connection = self.shell.dial(self)
        except OSError as error:
            self.lost(None, error)

    def proven(self, connection: Connection) -> None:
        """The peer has proven itself: both sides now introduce their agents."""
        connection.role = self
        connection.deadline = time.monotonic() + self.handshake_s
        connection.send(self.shell.introduction())

    def heard(self, connection: Connection, word: Word) -> None:
        if isinstance(word, Introduce) and self._regions is None:
            word.check(str(self.peer), self.contact.incarnation)
            try:
                self._regions = Regions(word.places)
            except TransportError as error:
                raise RemoteProtocolError(f"the peer's memory: {error}") from error
            self.agent = word.agent
            self.shell.learn(self, word.agent, word.metadata)
        elif isinstance(word, Ready) and not self._answered:
            if word.error:
                raise RemoteProtocolError(f"the peer cannot use this agent: {word.error}")
            self._answered = True
            self._may_start(connection)
        elif isinstance(word, Landed):
            self._landed(word)
        else:
            raise RemoteProtocolError(f"{type(word).__name__} out of place")

    def learnt(self, error: str) -> None:
        """The worker has added the peer's agent, or cannot."""
        connection = self.connection
        if connection is None:
            return
        if error:
            self.lost(connection, RemoteProtocolError(f"the peer's agent cannot be used: {error}"))
            return
        self._learnt = True
        self._may_start(connection)

    def _may_start(self, connection: Connection) -> None:
        if self.ready:
            connection.deadline = None
            self._pause_s = 0.0
            if self.flying:
                self.ring(awake=True)
            self.go_on()

    def _landed(self, word: Landed) -> None:
        operation = self.flying.get(word.number)
        if operation is not None and operation.move is not None and operation.op is Op.WRITE:
            most = operation.move.posted
            operation.landed.update(post for post in word.posts if post < most)
            self._conclude(operation)

    def reset(self) -> None:
        """Our agent is another one now: meet the peer again. What is in flight goes on."""
        connection, self.connection = self.connection, None
        self._learnt = self._answered = False
        self._regions = None
        if connection is not None:
            self.shell.drop(connection)

    def lost(self, connection: Connection | None, cause: Exception) -> None:
        """The bell is broken: nothing more is posted, and the peer is asked again about what is in flight."""
        if connection is not self.connection:
            return
        self.reset()
        for operation in self.flying.values():
            if operation.move is not None:
                operation.move.stopped = True
                # LIBFABRIC says DONE to a READ whose target has closed in its midst.
                operation.forsaken |= operation.op is Op.READ
        now = time.monotonic()
        final = isinstance(cause, ConnectionRefusedError | RefusedError)
        for operation in list(self.waiting):
            # Nothing of it has begun: it is tried again for a while, if that may help.
            if final or now - operation.posted_at > self.handshake_s:
                self.waiting.remove(operation)
                text = f"no connection to {self.peer}: {cause}"
                self.shell.report(OpFailed(operation.op_id, Reason.TRANSPORT, text))
        if isinstance(cause, ConnectionRefusedError) or (isinstance(cause, RefusedError) and cause.stale):
            self.gone()
        else:
            self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s or 0.05)
            self._redial_at = now + self._pause_s

    def gone(self) -> None:
        """The peer's process is proven gone: no memory of it is left to write to."""
        self.reset()
        if self.gone_since is None:
            self.gone_since = time.monotonic()
        for operation in list(self.flying.values()):
            assert operation.move is not None
            operation.forsaken = operation.move.stopped = True
            if operation.op is Op.WRITE or operation.quiet:
                self._end(operation)
        if not self.flying:
            self.gone_since = None  # a later process at the same address may be dialled

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> bool:
        """Ring, dial again, settle. Does our agent have to be replaced?"""
        if self.ready and self.flying and now - self._rung_at >= _RING_S:
            self.ring(awake=True)
        stale = False
        for operation in list(self.flying.values()):
            since = self.gone_since or operation.ended_at
            settled = operation.ended and now - operation.ended_at > SETTLE_S
            if self.gone_since is not None and settled:
                self._end(operation)
            elif (operation.ended or self.gone_since is not None) and now - since > DOUBT_S + SETTLE_S:
                error = operation.move is not None and (operation.move.error or self.gone_since is not None)
                stale |= bool(error) and operation.worker is self.shell.worker
        if not self.flying:
            self.gone_since = None
        self.go_on()
        return stale
