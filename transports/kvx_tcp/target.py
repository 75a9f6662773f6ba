"""The side that owns the memory: checks what peers open here, and answers in order."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from kvx.core.errors import RemoteProtocolError, TransportError
from kvx.core.model import Op
from kvx.memory import Memory
from kvx_tcp.connection import Connection, Outgoing
from kvx_tcp.frames import MAX_PIECES, Frame, Hello, Kind, Status, decode_open
from kvx_tcp.permits import Permits
from kvx_tcp.span import Cursor, Span

MAX_OPEN = 256
"""Operations that one group may have open here; initiators keep to a quarter of it."""
_VOID_BYTES = 256 << 10


@define(eq=False)
class Incoming:
    """An operation that a peer has opened here and that was permitted."""

    op: Op
    transfer: str
    span: Span
    refusal: Status = Status.OK


@define(eq=False)
class Group:
    """All connections that a peer dialled under one name; they share its operations and end together."""

    hello: Hello
    connections: set[Connection] = field(factory=set)
    operations: dict[int, Incoming] = field(factory=dict)
    pieces: int = 0


class Target:
    """Incoming operations of all peers. The transport tells it which connections are proven."""

    def __init__(self, memory: Memory, close: Callable[[Connection], None]) -> None:
        self.permits = Permits()
        self.groups: dict[bytes, Group] = {}
        self._memory = memory
        self._close = close
        self._scratch = memoryview(bytearray(_VOID_BYTES))
        self._zeros = memoryview(bytes(_VOID_BYTES))

    def join(self, hello: Hello, connection: Connection) -> None:
        """Serve a proven connection. Raises RemoteProtocolError for another peer's group."""
        group = self.groups.setdefault(hello.group, Group(hello))
        if group.hello.name != hello.name or group.hello.incarnation != hello.incarnation:
            raise RemoteProtocolError("this connection group belongs to another peer")
        group.connections.add(connection)
        connection.role = Server(self, group)

    def forbid(self, transfer: str) -> None:
        """From now on not one byte of this transfer is received into memory, or sent from it."""
        self.permits.forbid(transfer)
        for group in self.groups.values():
            for operation in group.operations.values():
                if operation.transfer == transfer:
                    self._end(group, operation)

    def close(self, group: Group, op_id: int) -> None:
        """The peer wants nothing more of this operation."""
        operation = group.operations.pop(op_id, None)
        if operation is not None:
            group.pieces -= len(operation.span.pieces)
            self._end(group, operation)

    def drop(self, group: Group) -> None:
        """Close every connection of a group: nothing of it lands any more."""
        self.groups.pop(group.hello.group, None)
        for connection in group.connections:
            self._close(connection)

    def fence(self, peer: str, generation: int) -> None:
        """Refuse this peer's older generations and close what it has open."""
        self.permits.fence(peer, generation)
        self.drop_peer(peer)

    def drop_peer(self, peer: str, keep: bytes = b"") -> None:
        """Close all connections of a peer, but for those of incarnation `keep`."""
        for group in list(self.groups.values()):
            if group.hello.name == peer and group.hello.incarnation != keep:
                self.drop(group)

    def _end(self, group: Group, operation: Incoming) -> None:
        """What is half received or half sent of it goes on without its memory."""
        operation.refusal = Status.FORBIDDEN
        for connection in group.connections:
            if connection.incoming is not None and connection.incoming.span is operation.span:
                connection.incoming.divert(self._scratch)
            if connection.outgoing is not None and connection.outgoing.span is operation.span:
                connection.outgoing.divert(self._zeros)

    def open(self, group: Group, op_id: int, body: bytearray) -> Status:
        op, stamp, ranges = decode_open(body)
        if op_id in group.operations:
            raise RemoteProtocolError(f"operation {op_id} is opened twice")
        if len(group.operations) >= MAX_OPEN or group.pieces + len(ranges) > 2 * MAX_PIECES:
            return Status.CAPACITY
        try:
            span = Span(self._memory, ranges)
        except TransportError:
            return Status.BOUNDS
        status = self.permits.check(group.hello.name, op, stamp, span)
        if status is Status.OK:
            group.operations[op_id] = Incoming(op, stamp.transfer, span)
            group.pieces += len(ranges)
        return status

    def sink(self, group: Group, frame: Frame) -> Cursor:
        operation = self.find(group, frame, Op.WRITE)
        if operation is None or operation.refusal:
            return Cursor.void(frame.length, self._scratch)
        return Cursor(operation.span, frame.offset, frame.length)

    def find(self, group: Group, frame: Frame, op: Op) -> Incoming | None:
        """The operation that a chunk belongs to. Raises RemoteProtocolError if it cannot be a part of it."""
        operation = group.operations.get(frame.op)
        if operation is not None and (operation.op is not op or frame.offset + frame.length > operation.span.nbytes):
            raise RemoteProtocolError(f"{frame.kind.name} lies outside of operation {frame.op}")
        return operation


class Server:
    """Role of a proven connection at the target."""

    accepts = frozenset({Kind.OPEN, Kind.PUT, Kind.GET, Kind.CLOSE, Kind.ABANDON})

    def __init__(self, target: Target, group: Group) -> None:
        self._target = target
        self.group = group

    def sink(self, connection: Connection, frame: Frame) -> Cursor:
        return self._target.sink(self.group, frame)

    def refill(self, connection: Connection) -> bool:
        return False

    def received(self, connection: Connection, frame: Frame, body: bytearray) -> None:
        group = self.group
        match frame.kind:
            case Kind.OPEN:
                _acknowledge(connection, frame._replace(length=0), self._target.open(group, frame.op, body))
            case Kind.PUT:
                operation = self._target.find(group, frame, Op.WRITE)
                _acknowledge(connection, frame, Status.UNKNOWN if operation is None else operation.refusal)
            case Kind.GET:
                operation = self._target.find(group, frame, Op.READ)
                if operation is None:
                    _acknowledge(connection, frame, Status.UNKNOWN)
                else:
                    _serve(connection, frame, operation)
            case Kind.CLOSE:
                self._target.close(group, frame.op)
            case Kind.ABANDON:
                self.abandon(bytes(body))
                _acknowledge(connection, frame._replace(length=0), Status.OK)
            case _:
                raise RemoteProtocolError(f"{frame.kind.name} is not a question")

    def lost(self, connection: Connection, cause: Exception) -> None:
        self._target.drop(self.group)

    def abandon(self, name: bytes) -> None:
        group = self._target.groups.get(name)
        if group is self.group or (group is not None and group.hello.name != self.group.hello.name):
            raise RemoteProtocolError("this connection group cannot be abandoned from here")
        if group is not None:
            self._target.drop(group)


def _acknowledge(connection: Connection, frame: Frame, status: Status) -> None:
    connection.send(Frame(Kind.ACK, status, frame.op, frame.offset, frame.length).encode())


def _serve(connection: Connection, frame: Frame, operation: Incoming) -> None:
    """Answer a GET. What is forbidden while its DATA leaves is told by the ACK behind it."""

    def acknowledge() -> Outgoing:
        return Frame(Kind.ACK, operation.refusal, frame.op, frame.offset, frame.length).encode(), None

    def data() -> Outgoing:
        if operation.refusal:
            return acknowledge()
        connection.send_later(acknowledge, first=True)
        return frame._replace(kind=Kind.DATA).encode(), Cursor(operation.span, frame.offset, frame.length)

    connection.send_later(data)
