"""The bell's connections: who is who, then one word after the other. One non-blocking socket each."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from select import EPOLLIN, EPOLLOUT
from typing import Protocol

from kvx.core.errors import RemoteProtocolError
from kvx_nixl.words import (
    MAX_FRAME,
    NONCE_BYTES,
    VERSION,
    Challenge,
    Hello,
    Proof,
    Reader,
    Refuse,
    Status,
    Word,
    encode,
    prove,
)

_TURN_BYTES = 1 << 20
_MAX_UNSENT = 64 << 20
"""A peer that reads nothing is cut off here."""


class RefusedError(RemoteProtocolError):
    """The acceptor does not want this connection. `proven`: it is really the acceptor that says so."""

    def __init__(self, status: int, proven: bool) -> None:
        super().__init__(f"refused with status {status}")
        self.proven = proven
        self.stale = proven and status == Status.STALE


class Role(Protocol):
    """What a connection is for. `heard` raises RemoteProtocolError for a word out of place."""

    def heard(self, connection: Connection, word: Word) -> None: ...

    def lost(self, connection: Connection, cause: Exception) -> None: ...


class Connection:
    """The socket belongs to it. Errors of the peer raise OSError or RemoteProtocolError."""

    def __init__(self, sock: socket.socket, role: Role, deadline: float | None) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.role = role
        self.deadline = deadline
        """Until when (monotonic seconds) the next step has to be made."""
        self.open = True
        self.mask = 0
        self.connecting = False
        self._reader = Reader()
        self._unsent = bytearray()

    @property
    def wanted(self) -> int:
        return EPOLLIN | (EPOLLOUT if self._unsent or self.connecting else 0)

    def trust(self) -> None:
        """The peer has proven itself: it may send longer words."""
        self._reader.limit = MAX_FRAME

    def send(self, word: Word) -> None:
        """Queue a word; what fits leaves at once. A broken connection shows at its next event."""
        self._unsent += encode(word)
        if not self.connecting:
            try:
                self.flush()
            except OSError:
                return

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(memoryview(self._unsent)[:_TURN_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                raise ConnectionAbortedError("the peer reads nothing") from None

    def move(self, event: int) -> None:
        """Send and receive what is possible now."""
        if self.connecting and event & ~EPOLLIN:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self.connecting = False
        if self.connecting:
            return
        self.flush()
        if event & ~EPOLLOUT:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self.sock.recv(_TURN_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("closed by the peer")
        for word in self._reader.feed(data):
            if not self.open:
                return
            self.role.heard(self, word)

    def close(self) -> None:
        self.open = False
        self.sock.close()


class Dialling:
    """The dialler's half of the handshake. `ready` is called when the acceptor has proven itself."""

    def __init__(
        self,
        secret: bytes,
        hello: Hello,
        ready: Callable[[Connection], None],
        lost: Callable[[Connection, Exception], None],
    ) -> None:
        self._secret = secret
        self._hello = hello
        self._ready = ready
        self._challenge = b""
        self.lost = lost

    def heard(self, connection: Connection, word: Word) -> None:
        if isinstance(word, Refuse):
            raise RefusedError(word.status, self._good(word.mac, b"refuse %d" % word.status))
        if isinstance(word, Challenge) and not self._challenge:
            self._challenge = word.nonce
            connection.send(Proof(prove(self._secret, b"dialler", self._hello, self._challenge)))
        elif isinstance(word, Proof) and self._good(word.mac, b"acceptor"):
            connection.trust()
            self._ready(connection)
        else:
            raise RemoteProtocolError("the acceptor does not prove that it knows the secret")

    def _good(self, mac: bytes, label: bytes) -> bool:
        return bool(self._challenge) and hmac.compare_digest(
            prove(self._secret, label, self._hello, self._challenge), mac
        )


class Accepting:
    """The acceptor's half. `judge` looks at a proven Hello, `ready` takes the connection over."""

    def __init__(
        self,
        secret: bytes,
        judge: Callable[[Hello], Status | None],
        ready: Callable[[Hello, Connection], None],
    ) -> None:
        self._secret = secret
        self._judge = judge
        self._ready = ready
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._hello: Hello | None = None

    def heard(self, connection: Connection, word: Word) -> None:
        if isinstance(word, Hello) and self._hello is None:
            self._hello = word
            connection.send(Challenge(self._challenge))
        elif isinstance(word, Proof) and self._hello is not None:
            self._prove(connection, self._hello, word.mac)
        else:
            raise RemoteProtocolError("the handshake is out of order")

    def _prove(self, connection: Connection, hello: Hello, mac: bytes) -> None:
        if not hmac.compare_digest(prove(self._secret, b"dialler", hello, self._challenge), mac):
            connection.send(Refuse(Status.AUTH, b""))
            raise RefusedError(Status.AUTH, proven=True)
        status = Status.VERSION if hello.version != VERSION else self._judge(hello)
        if status is not None:
            connection.send(Refuse(status, prove(self._secret, b"refuse %d" % status, hello, self._challenge)))
            raise RefusedError(status, proven=True)
        connection.trust()
        connection.send(Proof(prove(self._secret, b"acceptor", hello, self._challenge)))
        self._ready(hello, connection)

    def lost(self, connection: Connection, cause: Exception) -> None:
        return
