"""One non-blocking socket: frames in, frames out, payload straight between socket and memory."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from select import EPOLLIN, EPOLLOUT
from typing import Protocol

from kvx.core.errors import RemoteProtocolError
from kvx_tcp.frames import BODY_LIMIT, HEADER_BYTES, PAYLOAD, Frame, Kind
from kvx_tcp.span import Cursor

MAX_QUEUED = 256
"""Answers that may wait in an acceptor's queue before it stops to read more questions."""

Outgoing = tuple[bytes, Cursor | None]
"""What one turn of the queue puts on the wire: header (and structure), then payload."""


class Role(Protocol):
    """What a connection is for at the moment."""

    accepts: frozenset[Kind]
    """Frames that the other side may send now; any other ends the connection."""

    def received(self, connection: Connection, frame: Frame, body: bytearray) -> None:
        """A whole frame is here; of a payload frame, its last byte is in its place."""

    def sink(self, connection: Connection, frame: Frame) -> Cursor:
        """Where the payload of this frame goes; checked before a byte of it is received."""

    def refill(self, connection: Connection) -> bool:
        """The queue is empty: queue what is next, if anything is."""

    def lost(self, connection: Connection, cause: Exception) -> None:
        """The connection cannot be used any more; it is closed."""


class Connection:
    """The socket belongs to it. Errors of the peer raise OSError or RemoteProtocolError."""

    def __init__(self, sock: socket.socket, role: Role) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.role = role
        self.open = True
        self.mask = 0
        self.hungry = False
        self.incoming: Cursor | None = None
        self.outgoing: Cursor | None = None
        self._header = bytearray(HEADER_BYTES)
        self._frame: Frame | None = None
        self._body = bytearray()
        self._want = memoryview(self._header)
        self._queue: deque[Callable[[], Outgoing]] = deque()
        self._head = memoryview(b"")

    def send(self, data: bytes) -> None:
        """Queue one frame without payload."""
        self.send_later(lambda: (data, None))

    def send_later(self, make: Callable[[], Outgoing], first: bool = False) -> None:
        """Queue a frame that is made when its turn comes: it may have been forbidden by then."""
        if first:
            self._queue.appendleft(make)
        else:
            self._queue.append(make)
        self.hungry = True

    @property
    def pending(self) -> bool:
        """Is anything queued or half sent?"""
        return bool(self._queue or self._head or self.outgoing)

    @property
    def wanted(self) -> int:
        """The epoll events that can move this connection on."""
        reading = EPOLLIN if len(self._queue) < MAX_QUEUED else 0
        return reading | (EPOLLOUT if self.hungry else 0)

    def receive(self, budget: int) -> None:
        """Take what has arrived, at most about `budget` bytes and while answers have room."""
        try:
            while budget > 0 and self.open and len(self._queue) < MAX_QUEUED:
                if self.incoming is not None:
                    views, room = self.incoming.views(), self.incoming.viewed
                    if room == self.incoming.remaining:  # the next header may come with it
                        views = [*views, self._want]
                    count = self.sock.recvmsg_into(views)[0]
                else:
                    room = len(self._want)
                    count = self.sock.recv_into(self._want)
                if not count:
                    raise ConnectionResetError("closed by the peer")
                budget -= count
                self._taken(count)
                if count < room:  # the socket is dry; epoll tells when it is not
                    return
        except BlockingIOError:
            return

    def _taken(self, count: int) -> None:
        if self.incoming is not None:
            payload = min(count, self.incoming.remaining)
            self.incoming.advance(payload)
            count -= payload
            if not self.incoming.remaining:
                self.incoming = None
                self._finish()
            if not count or not self.open:
                return
        self._want = self._want[count:]
        if self._want:
            return
        if self._frame is not None:
            self._finish()
            return
        frame = Frame.decode(self._header)
        if frame.kind not in self.role.accepts:
            raise RemoteProtocolError(f"{frame.kind.name} is not allowed here")
        self._frame = frame
        if frame.kind in PAYLOAD:
            self.incoming = self.role.sink(self, frame)
        elif frame.kind in BODY_LIMIT and frame.length:
            self._body = bytearray(frame.length)
            self._want = memoryview(self._body)
        else:
            self._finish()

    def _finish(self) -> None:
        frame, body = self._frame, self._body
        self._frame, self._body, self._want = None, bytearray(), memoryview(self._header)
        if frame is not None:
            self.role.received(self, frame, body)

    def transmit(self, budget: int) -> None:
        """Send what is queued, at most about `budget` bytes."""
        try:
            while budget > 0 and self.open and (self.pending or self.role.refill(self)):
                if not self._head and self.outgoing is None:
                    self._load()
                views, room = ([self._head] if self._head else []), len(self._head)
                if self.outgoing is not None:
                    views += self.outgoing.views()
                    room += self.outgoing.viewed
                sent = self.sock.sendmsg(views, (), socket.MSG_NOSIGNAL)
                budget -= sent
                self._sent(sent)
                if sent < room:  # the socket is full
                    return
            self.hungry = self.pending or budget <= 0
        except BlockingIOError:
            return

    def _load(self) -> None:
        """Take frames from the queue up to the first with payload."""
        heads: list[bytes] = []
        while self._queue and self.outgoing is None and len(heads) < MAX_QUEUED:
            head, self.outgoing = self._queue.popleft()()
            heads.append(head)
        self._head = memoryview(b"".join(heads))

    def _sent(self, count: int) -> None:
        head = min(count, len(self._head))
        self._head = self._head[head:]
        if self.outgoing is not None:
            self.outgoing.advance(count - head)
            if not self.outgoing.remaining:
                self.outgoing = None

    def close(self) -> None:
        """Nothing is received or sent any more when this returns."""
        self.open = False
        self.incoming = self.outgoing = None
        self._queue.clear()
        self.sock.close()
