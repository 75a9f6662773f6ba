"""The initiator's connections to one peer: operations cut into chunks and shared out fairly.

Operations take turns, one chunk each. The chunks of an operation follow its OPEN on the same
connection; once that is acknowledged, they go wherever there is room.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from attrs import define, field

from kvx.core.errors import RemoteProtocolError
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, Op, Reason, Stamp
from kvx_tcp.connection import Connection
from kvx_tcp.frames import Frame, Kind, Status, encode_open, message
from kvx_tcp.span import Cursor, Span

MAX_IN_FLIGHT = 64
"""Operations that are open at one peer at a time; further ones wait in order."""
ALONE = 8
"""Chunks that an operation moves in one turn while no other one waits for its own."""
READ_AHEAD = 2 * ALONE
"""Chunks that may be on their way to this side on one connection."""


@define(eq=False)
class Operation:
    """One posted operation. `asked` bytes are on their way or done, `moved` are acknowledged."""

    op_id: int
    op: Op
    stamp: Stamp
    local: Span
    remote: Descriptors
    home: Connection | None = None
    accepted: bool = False
    asked: int = 0
    moved: int = 0
    unanswered: int = 0
    failure: tuple[Reason, str] | None = None
    over: bool = False


@define(eq=False)
class Doubt:
    """Writes of which a broken group of connections may still deliver bytes, and how they failed."""

    group: bytes
    failures: list[OpFailed]


class _Question(NamedTuple):
    """What the next answer on a connection must be about."""

    kind: Kind
    op: int = 0
    offset: int = 0
    length: int = 0
    operation: Operation | None = None
    doubt: Doubt | None = None


@define(eq=False)
class Link:
    """Role of the dialled connections to one peer, from WELCOME on."""

    chunk_bytes: int
    scratch: memoryview
    report: Callable[[OpDone | OpFailed], None]
    wake: Callable[[Connection], None]
    broken: Callable[[Link, Exception], None]
    settled: Callable[[Doubt], None]
    group: bytes = field(factory=lambda: secrets.token_bytes(16))
    connections: list[Connection] = field(factory=list)
    operations: dict[int, Operation] = field(factory=dict)
    accepts: frozenset[Kind] = frozenset({Kind.DATA, Kind.ACK})
    _questions: dict[Connection, deque[_Question]] = field(factory=dict)
    _waiting: deque[Operation] = field(factory=deque)
    _turns: deque[Operation] = field(factory=deque)

    def ready(self, connection: Connection, doubts: list[Doubt]) -> None:
        """The peer has proven itself on this connection. The first one asks about earlier groups."""
        connection.role = self
        first = not self._questions
        self._questions[connection] = deque()
        if first:
            for doubt in doubts:
                self._ask(connection, _Question(Kind.ABANDON, doubt=doubt))
                connection.send(message(Kind.ABANDON, doubt.group))
        self.wake(connection)

    def post(self, operation: Operation) -> None:
        self.operations[operation.op_id] = operation
        self._waiting.append(operation)
        self._wake()

    def cancel(self, operation: Operation) -> None:
        if operation.failure is None:
            operation.failure = (Reason.ABORTED, "cancelled")
            self._settle(operation)

    def lost(self, connection: Connection, cause: Exception) -> None:
        self.broken(self, cause)

    def end(self, cause: str) -> Doubt | None:
        """All connections are closed: fail what is certain, return what is not."""
        doubt = Doubt(self.group, [])
        for operation in self.operations.values():
            operation.over = True
            failed = OpFailed(operation.op_id, *(operation.failure or (Reason.TRANSPORT, cause)))
            if operation.op is Op.WRITE and operation.unanswered:
                doubt.failures.append(failed)
            else:
                self.report(failed)
        self.operations.clear()
        return doubt if doubt.failures else None

    # ------------------------------------------------------------ sending

    def refill(self, connection: Connection) -> bool:
        """Give this connection the next chunk of the next operation that may use it."""
        while self._waiting and len(self.operations) - len(self._waiting) < MAX_IN_FLIGHT:
            self._turns.append(self._waiting.popleft())
        for _ in range(len(self._turns)):
            operation = self._turns.popleft()
            self._advance(connection, operation)
            if operation.home is None or operation.asked < operation.local.nbytes:
                self._turns.append(operation)
            if connection.pending:
                return True
        return False

    def _advance(self, connection: Connection, operation: Operation) -> None:
        if operation.home is None:
            operation.home = connection
            self._ask(connection, _Question(Kind.OPEN, operation.op_id, operation=operation))
            connection.send(encode_open(operation.op_id, operation.op, operation.stamp, operation.remote))
        elif not operation.accepted and operation.home is not connection:
            return
        if operation.op is Op.READ and self._awaited(connection) >= READ_AHEAD * self.chunk_bytes:
            return
        offset = operation.asked
        length = min(self.chunk_bytes * (1 if self._turns else ALONE), operation.local.nbytes - offset)
        if length:
            operation.asked += length
            kind = Kind.PUT if operation.op is Op.WRITE else Kind.GET
            frame = Frame(kind, 0, operation.op_id, offset, length)
            self._ask(connection, _Question(kind, operation.op_id, offset, length, operation))
            if operation.op is Op.WRITE:
                cursor = Cursor(operation.local, offset, length)
                connection.send_later(lambda: (frame.encode(), cursor))
            else:
                connection.send(frame.encode())

    def _awaited(self, connection: Connection) -> int:
        """Bytes that were asked for on this connection and have not been acknowledged."""
        return sum(question.length for question in self._questions[connection] if question.kind is not Kind.PUT)

    def _ask(self, connection: Connection, question: _Question) -> None:
        self._questions[connection].append(question)
        if question.operation is not None:
            question.operation.unanswered += 1

    def _wake(self) -> None:
        for connection in self._questions:
            self.wake(connection)

    # ------------------------------------------------------------ receiving

    def _question(self, connection: Connection, frame: Frame) -> _Question:
        """What this frame answers. Answers come in the order of the questions, and repeat them."""
        questions = self._questions[connection]
        if not questions or (frame.op, frame.offset, frame.length) != questions[0][1:4]:
            raise RemoteProtocolError(f"{frame.kind.name} answers no question")
        return questions[0]

    def sink(self, connection: Connection, frame: Frame) -> Cursor:
        question = self._question(connection, frame)
        operation = question.operation
        if question.kind is not Kind.GET or operation is None:
            raise RemoteProtocolError("DATA that was not asked for")
        if operation.over:
            return Cursor.void(frame.length, self.scratch)
        return Cursor(operation.local, frame.offset, frame.length)

    def received(self, connection: Connection, frame: Frame, body: bytearray) -> None:
        question = self._question(connection, frame)
        if frame.kind is Kind.DATA:
            self._questions[connection][0] = question._replace(kind=Kind.DATA)
            return
        status = Status(frame.status)
        if question.kind is Kind.GET and status is Status.OK:
            raise RemoteProtocolError("a GET was acknowledged before its DATA")
        self._questions[connection].popleft()
        connection.hungry = True
        if question.doubt is not None:
            self.settled(question.doubt)
        if question.operation is not None:
            self._answered(question.operation, question, status)

    def _answered(self, operation: Operation, question: _Question, status: Status) -> None:
        operation.unanswered -= 1
        if status is not Status.OK:
            operation.failure = operation.failure or (status.reason, status.text)
        elif question.kind is Kind.OPEN:
            operation.accepted = True
            self._wake()
        else:
            operation.moved += question.length
        self._settle(operation)

    def _settle(self, operation: Operation) -> None:
        """End the operation if nothing of it can land any more (R14)."""
        if operation.over:
            return
        done = operation.accepted and operation.moved == operation.local.nbytes
        if not done and operation.failure is None:
            return
        self._withdraw(operation)
        if operation.op is Op.WRITE and operation.unanswered:
            return
        operation.over = True
        del self.operations[operation.op_id]
        if operation.home is not None:
            operation.home.send(Frame(Kind.CLOSE, op=operation.op_id).encode())
        self._wake()
        if done:
            self.report(OpDone(operation.op_id, operation.moved))
        elif operation.failure is not None:
            self.report(OpFailed(operation.op_id, *operation.failure))

    def _withdraw(self, operation: Operation) -> None:
        """Ask for nothing more of it, and let nothing more of a READ into its memory."""
        queue = self._turns if operation in self._turns else self._waiting
        if operation.home is None or queue is self._turns:
            queue.remove(operation)
        for connection in self._questions:
            if connection.incoming is not None and connection.incoming.span is operation.local:
                connection.incoming.divert(self.scratch)
