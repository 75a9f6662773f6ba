"""The bell's sockets: a listener, connections in and out, and the one epoll that everything of a transport is in."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from errno import EINPROGRESS
from select import EPOLLIN, epoll

from kvx.core.errors import RemoteProtocolError, TransportError
from kvx_nixl.bell import Accepting, Connection, Dialling
from kvx_nixl.options import Options, resolve
from kvx_nixl.words import Contact, Hello, Status

_MAX_STRANGERS = 64
_MAX_CONNECTIONS = 4096
_EVENTS = 64


class Switchboard:
    """Every method belongs to the runtime's thread.

    Of who calls, `judge` says whether the proven Hello is welcome, and `proven` takes the connection over.
    """

    def __init__(
        self, options: Options, judge: Callable[[Hello], Status | None], proven: Callable[[Hello, Connection], None]
    ) -> None:
        self._options = options
        self._judge = judge
        self._proven = proven
        self._epoll = epoll()
        self._listener: socket.socket | None = None
        self._advertised = ""
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[Connection, None] = {}

    # ------------------------------------------------------------ the listener

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def listen(self) -> None:
        """Raises TransportError for an address that cannot be used."""
        options = self._options
        try:
            family, host = resolve(options.listen_host, options.port)
            _, self._advertised = resolve(options.advertise_host or host, options.port)
            if not options.may_use(host):
                raise TransportError(f"without a secret kvx_nixl listens on loopback only, not on {host}")
            if ipaddress.ip_address(self._advertised).is_unspecified:
                raise TransportError("advertise_host must name an address that peers can dial")
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, options.port))
                listener.listen(_MAX_STRANGERS)
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            raise TransportError(f"cannot listen on {options.listen_host} port {options.port}: {error}") from error
        self._listener = listener
        self._epoll.register(listener.fileno(), EPOLLIN)

    @property
    def address(self) -> tuple[str, int]:
        """What peers dial. Raises TransportError before it listens."""
        if self._listener is None:
            raise TransportError("the address is known once memory is registered")
        return self._advertised, self._options.advertise_port or self._listener.getsockname()[1]

    # ------------------------------------------------------------ events

    def fileno(self) -> int:
        return self._epoll.fileno()

    def include(self, fd: int) -> None:
        """Wake for this descriptor too; `poll` returns it."""
        self._epoll.register(fd, EPOLLIN)

    def wait(self, seconds: float) -> None:
        """Block until anything has happened."""
        self._epoll.poll(seconds, 1)

    def poll(self) -> list[int]:
        """Move what can be moved now. Returns the included descriptors that are readable."""
        others = []
        for fd, event in self._epoll.poll(0, _EVENTS):
            connection = self._connections.get(fd)
            if connection is not None:
                self._move(connection, event)
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept(self._listener)
            else:
                others.append(fd)
        return others

    @property
    def waiting(self) -> bool:
        """Has any connection a deadline?"""
        return any(connection.deadline is not None for connection in self._connections.values())

    def expire(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.deadline is not None and now > connection.deadline:
                self._lose(connection, TimeoutError("the handshake has taken too long"))

    # ------------------------------------------------------------ connections

    def dial(self, contact: Contact, hello: Hello, role: Dialling) -> Connection:
        """Raises OSError."""
        version = ipaddress.ip_address(contact.host).version
        sock = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            _prepare(sock)
            status = sock.connect_ex((contact.host, contact.port))
            if status not in (0, EINPROGRESS):
                raise OSError(status, os.strerror(status))
        except OSError:
            sock.close()
            raise
        connection = Connection(sock, role, time.monotonic() + self._options.handshake_s)
        connection.connecting = True
        connection.send(hello)
        self._add(connection)
        return connection

    def watch(self, connection: Connection) -> None:
        """What it waits for may have changed."""
        if connection.open and connection.mask != connection.wanted:
            connection.mask = connection.wanted
            self._epoll.modify(connection.fd, connection.mask)

    def drop(self, connection: Connection) -> None:
        if connection.open:
            self._connections.pop(connection.fd, None)
            self._strangers.pop(connection, None)
            connection.close()

    def _move(self, connection: Connection, event: int) -> None:
        try:
            connection.move(event)
        except (OSError, RemoteProtocolError) as error:
            self._lose(connection, error)
        self.watch(connection)

    def _lose(self, connection: Connection, cause: Exception) -> None:
        if connection.open:
            self.drop(connection)
            connection.role.lost(connection, cause)

    def _add(self, connection: Connection) -> None:
        connection.mask = connection.wanted
        self._epoll.register(connection.fd, connection.mask)
        self._connections[connection.fd] = connection

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it has gone, or there are no descriptors; the next one is tried at the next poll
        if len(self._connections) >= _MAX_CONNECTIONS:
            sock.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._lose(next(iter(self._strangers)), TimeoutError("too many connections without proof"))
        role = Accepting(self._options.secret, self._judge, self._welcome)
        connection = Connection(sock, role, time.monotonic() + self._options.handshake_s)
        try:
            _prepare(sock)
            self._add(connection)
        except OSError:
            connection.close()
            return
        self._strangers[connection] = None

    def _welcome(self, hello: Hello, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._proven(hello, connection)

    # ------------------------------------------------------------ the end

    def hang_up(self) -> None:
        """Close all connections and wake nobody any more; the listener stays."""
        for connection in list(self._connections.values()):
            self.drop(connection)
        self._epoll.close()

    def close(self) -> None:
        """Close the listener too: from now on peers are refused."""
        if self._listener is not None:
            self._listener.close()


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
