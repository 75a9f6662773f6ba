"""Who is who on a data connection: HELLO, CHALLENGE, PROOF, WELCOME. Nothing else is accepted before.

Both sides prove that they know the secret, by a MAC over both nonces and both names. Only a
REFUSE after a good PROOF carries a MAC, and only that one is believed to come from the peer.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from kvx.core.errors import RemoteProtocolError
from kvx_tcp.connection import Connection
from kvx_tcp.frames import Frame, Hello, Kind, Status, message, prove
from kvx_tcp.span import Cursor

NONCE_BYTES = 16


class RefusedError(RemoteProtocolError):
    """The acceptor does not want this connection. `proven`: it is really the acceptor that says so."""

    def __init__(self, status: Status, proven: bool) -> None:
        super().__init__(status.text)
        self.status = status
        self.proven = proven


class _Handshake:
    accepts: frozenset[Kind] = frozenset()

    def sink(self, connection: Connection, frame: Frame) -> Cursor:
        raise RemoteProtocolError("payload before the handshake")

    def refill(self, connection: Connection) -> bool:
        return False


class Dialling(_Handshake):
    """The dialler's half. `ready` is called when the acceptor has proven itself, `gone` if it never does."""

    accepts = frozenset({Kind.CHALLENGE, Kind.WELCOME, Kind.REFUSE})

    def __init__(
        self, secret: bytes, hello: Hello, ready: Callable[[Connection], None], gone: Callable[[Exception], None]
    ) -> None:
        self._secret = secret
        self._hello = hello
        self._ready = ready
        self._gone = gone
        self._challenge = b""

    def received(self, connection: Connection, frame: Frame, body: bytearray) -> None:
        if frame.kind is Kind.REFUSE:
            status = Status(frame.status)
            raise RefusedError(status, self._good(body, b"refuse %d" % status))
        if frame.kind is Kind.CHALLENGE and not self._challenge and len(body) == NONCE_BYTES:
            self._challenge = bytes(body)
            connection.send(message(Kind.PROOF, prove(self._secret, b"dialler", self._hello, self._challenge)))
        elif frame.kind is Kind.WELCOME and self._good(body, b"acceptor"):
            self._ready(connection)
        else:
            raise RemoteProtocolError("the acceptor does not prove that it knows the secret")

    def _good(self, body: bytearray, label: bytes) -> bool:
        expected = prove(self._secret, label, self._hello, self._challenge)
        return bool(self._challenge) and hmac.compare_digest(expected, body)

    def lost(self, connection: Connection, cause: Exception) -> None:
        self._gone(cause)


class Accepting(_Handshake):
    """The acceptor's half. `judge` looks at a proven HELLO, `ready` takes the connection over."""

    accepts = frozenset({Kind.HELLO, Kind.PROOF})

    def __init__(
        self,
        secret: bytes,
        judge: Callable[[Hello], Status],
        ready: Callable[[Hello, Connection], None],
    ) -> None:
        self._secret = secret
        self._judge = judge
        self._ready = ready
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._hello: Hello | None = None

    def received(self, connection: Connection, frame: Frame, body: bytearray) -> None:
        if frame.kind is Kind.HELLO and self._hello is None:
            self._hello = Hello.decode(body)
            connection.send(message(Kind.CHALLENGE, self._challenge))
        elif frame.kind is Kind.PROOF and self._hello is not None:
            self._prove(connection, self._hello, body)
        else:
            raise RemoteProtocolError("the handshake is out of order")

    def _prove(self, connection: Connection, hello: Hello, body: bytearray) -> None:
        if not hmac.compare_digest(prove(self._secret, b"dialler", hello, self._challenge), body):
            self._refuse(connection, message(Kind.REFUSE, b"", Status.AUTH), Status.AUTH)
        status = self._judge(hello)
        if status is not Status.OK:
            proof = prove(self._secret, b"refuse %d" % status, hello, self._challenge)
            self._refuse(connection, message(Kind.REFUSE, proof, status), status)
        connection.send(message(Kind.WELCOME, prove(self._secret, b"acceptor", hello, self._challenge)))
        self._ready(hello, connection)

    def _refuse(self, connection: Connection, answer: bytes, status: Status) -> None:
        connection.send(answer)
        connection.transmit(len(answer))
        raise RefusedError(status, proven=True)

    def lost(self, connection: Connection, cause: Exception) -> None:
        return
