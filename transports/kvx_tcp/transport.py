"""The transport: sockets, one epoll, and a bounded amount of work per poll."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from select import EPOLLERR, EPOLLHUP, EPOLLIN, epoll
from typing import Any

import msgspec

from kvx.core.errors import RemoteProtocolError, TransportError
from kvx.core.events import Fenced, Forbidden
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Region, Stamp
from kvx.memory import Memory
from kvx.transport import Access, Capabilities, Completion, FenceScope
from kvx_tcp.connection import Connection
from kvx_tcp.frames import MAX_PIECES, VERSION, Hello, Status
from kvx_tcp.handshake import Accepting, Dialling
from kvx_tcp.initiator import Initiator, Metadata, Remote
from kvx_tcp.link import MAX_IN_FLIGHT, Link
from kvx_tcp.options import Options, resolve
from kvx_tcp.span import Span
from kvx_tcp.target import Target
from kvx_tcp.timer import Timer

_SLICE_S = 0.004
"""About how long one poll may work."""
_EVENTS = 4
"""Events that are handled without a look at the clock."""
_TURN_BYTES = 2 << 20
"""What one connection may receive, and send, before another one has its turn."""
_MAX_STRANGERS = 64
"""Accepted connections that have not proven themselves; the oldest makes room for a newer one."""
_MAX_CONNECTIONS = 4096
_ACCEPT_PAUSE_S = 0.5
_RETIRED = 1024


class TcpTransport:
    """See `kvx.transport.Transport`. Every method belongs to the runtime's thread."""

    capabilities = Capabilities(
        ops=frozenset(Op),
        access=Access.GRANT,
        fence=FenceScope.PEER,
        cancel=True,
        max_descriptors=MAX_PIECES,
        max_in_flight=MAX_IN_FLIGHT,
    )
    idle_poll_s: float | None = None

    def __init__(self, section: Mapping[str, Any]) -> None:
        """Raises ConfigError for options that cannot be used."""
        self.options = Options.of(section)
        self._incarnation = secrets.token_bytes(16)
        self._epoll = epoll()
        self._timer = Timer()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._timer.fd, EPOLLIN)
        self._epoll.register(self._bell, EPOLLIN)
        self._completions: list[Completion] = []
        self._polling = False
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[Connection, None] = {}
        self._handshakes: dict[Connection, int] = {}
        self._retired: deque[bytes] = deque(maxlen=_RETIRED)
        self._memory = Memory(())
        self._target = Target(self._memory, self.drop)
        self._initiator = Initiator(self._memory, self, self.options.chunk_bytes)
        self._listener: socket.socket | None = None
        self._advertised = ""
        self._closed = False

    # ------------------------------------------------------------ set-up

    def register(self, regions: Sequence[Region]) -> None:
        if self._listener is not None or self._closed:
            raise TransportError("memory is registered once, before anything else")
        self._memory = Memory(regions)
        self._target = Target(self._memory, self.drop)
        self._initiator = Initiator(self._memory, self, self.options.chunk_bytes)
        self._listen()

    def _listen(self) -> None:
        options = self.options
        try:
            family, host = resolve(options.listen_host, options.port)
            _, self._advertised = resolve(options.advertise_host or host, options.port)
            if not options.may_use(host):
                raise TransportError(f"without a secret kvx_tcp listens on loopback only, not on {host}")
            if ipaddress.ip_address(self._advertised).is_unspecified:
                raise TransportError("advertise_host must name an address that peers can dial")
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._size(listener)
                listener.bind((host, options.port))
                listener.listen(_MAX_STRANGERS)
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            raise TransportError(f"cannot listen on {options.listen_host} port {options.port}: {error}") from error
        self._listener = listener
        self._epoll.register(listener.fileno(), EPOLLIN)

    def metadata(self) -> bytes:
        if self._listener is None:
            raise TransportError("metadata exists once memory is registered")
        port = self.options.advertise_port or self._listener.getsockname()[1]
        return msgspec.msgpack.encode(
            Metadata(VERSION, self._advertised, port, self.options.streams, self._incarnation)
        )

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        decoded = Metadata.decode(metadata)
        if not self.options.may_use(decoded.host):
            raise TransportError(f"without a secret kvx_tcp connects on loopback only, not to {decoded.host}")
        old = self._initiator.connect(info, decoded)
        if old is None:
            return
        keep = decoded.incarnation if decoded.incarnation != old.incarnation else b""
        if keep:
            self._retired.append(old.incarnation)
        self._target.drop_peer(str(info.peer), keep)

    # ------------------------------------------------------------ the port

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        if transfer != stamp.transfer:
            raise TransportError(f"permit for {transfer} with the stamp of {stamp.transfer}")
        name = None if peer is None else str(peer)
        self._target.permits.permit(name, op, Span(self._memory, ranges), stamp)

    def forbid(self, transfer: str) -> None:
        self._target.forbid(transfer)
        self.report(Forbidden(transfer))

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self._initiator.post(op_id, peer, op, local, remote, stamp)

    def cancel(self, op_id: int) -> None:
        self._initiator.cancel(op_id)

    def fence(self, peer: Peer, generation: int) -> None:
        self._target.fence(str(peer), generation)
        self.report(Fenced(peer, generation))

    def poll(self) -> list[Completion]:
        if self._closed:
            return []
        if self._completions:
            os.eventfd_read(self._bell)
        self._polling = True
        try:
            deadline = time.monotonic() + _SLICE_S
            # Few events at a time: epoll puts them at the end of its list, so that all have their turn.
            while time.monotonic() < deadline:
                events = self._epoll.poll(0, _EVENTS)
                for fd, event in events:
                    self._handle(fd, event)
                if len(events) < _EVENTS:
                    break
        finally:
            self._polling = False
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        """The listener goes last: whoever is refused knows that nothing is received any more."""
        if self._closed:
            return
        self._closed = True
        for connection in list(self._connections.values()):
            self.drop(connection)
        if self._listener is not None:
            self._listener.close()
        self._timer.close()
        os.close(self._bell)
        self._epoll.close()
        self._completions.clear()

    # ------------------------------------------------------------ connections

    def _handle(self, fd: int, event: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None:
            self._move(connection, event)
        elif fd == self._timer.fd:
            self._timer.run()
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept(self._listener)

    def _move(self, connection: Connection, event: int) -> None:
        try:
            if event & (EPOLLERR | EPOLLHUP) and not connection.mask & EPOLLIN:
                raise ConnectionResetError("closed by the peer")
            if event & (EPOLLIN | EPOLLERR | EPOLLHUP):
                connection.receive(_TURN_BYTES)
            if connection.hungry and connection.open:
                connection.transmit(_TURN_BYTES)
        except (OSError, RemoteProtocolError) as error:
            self._lose(connection, error)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.open and connection.mask != connection.wanted:
            connection.mask = connection.wanted
            self._epoll.modify(connection.fd, connection.mask)

    def _lose(self, connection: Connection, cause: Exception) -> None:
        if connection.open:
            self.drop(connection)
            connection.role.lost(connection, cause)

    def drop(self, connection: Connection) -> None:
        if connection.open:
            self._connections.pop(connection.fd, None)
            self._strangers.pop(connection, None)
            self._introduced(connection)
            connection.close()

    def _add(self, connection: Connection) -> None:
        connection.mask = connection.wanted
        self._epoll.register(connection.fd, connection.mask)
        self._connections[connection.fd] = connection
        self._handshakes[connection] = self._timer.later(
            self.options.handshake_s,
            lambda: self._lose(connection, TimeoutError(f"no handshake within {self.options.handshake_s} s")),
        )

    def _introduced(self, connection: Connection) -> None:
        """The handshake is over, well or not: its deadline shall wake nobody."""
        number = self._handshakes.pop(connection, None)
        if number is not None:
            self._timer.forget(number)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: a level-triggered listener would now wake the runtime without end.
            self._epoll.modify(listener.fileno(), 0)
            self._timer.later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            sock.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._lose(next(iter(self._strangers)), TimeoutError("too many connections without proof"))
        connection = Connection(sock, Accepting(self.options.secret, self._judge, self._proven))
        try:
            self._prepare(sock)
            self._add(connection)
        except OSError:
            connection.close()
            return
        self._strangers[connection] = None

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._epoll.modify(self._listener.fileno(), EPOLLIN)

    def _judge(self, hello: Hello) -> Status:
        if (hello.target, hello.target_incarnation) != (self.options.peer, self._incarnation):
            return Status.STALE
        return Status.AUTH if hello.incarnation in self._retired else Status.OK

    def _proven(self, hello: Hello, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._introduced(connection)
        self._target.join(hello, connection)

    def dial(self, remote: Remote, link: Link) -> None:
        metadata = remote.metadata
        hello = Hello(
            self.options.peer,
            str(remote.peer),
            self._incarnation,
            metadata.incarnation,
            link.group,
            secrets.token_bytes(16),
        )
        for _ in range(min(self.options.streams, metadata.streams)):
            fresh = msgspec.structs.replace(hello, nonce=secrets.token_bytes(16))
            sock = socket.socket(metadata.family, socket.SOCK_STREAM)
            try:
                self._prepare(sock)
                self._size(sock)
                status = sock.connect_ex((metadata.host, metadata.port))
                if status not in (0, errno.EINPROGRESS):
                    raise OSError(status, os.strerror(status))
            except OSError:
                sock.close()
                raise
            role = Dialling(
                self.options.secret,
                fresh,
                lambda connection: self._welcomed(connection, link, remote),
                lambda cause: link.broken(link, cause),
            )
            connection = Connection(sock, role)
            link.connections.append(connection)
            connection.send(fresh.encode())
            self._add(connection)

    def _welcomed(self, connection: Connection, link: Link, remote: Remote) -> None:
        self._introduced(connection)
        link.ready(connection, remote.doubts)

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        silence_s = self.options.silence_s
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 4)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence_s / 4)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))

    def _size(self, sock: socket.socket) -> None:
        """Set before connect and listen, so that the window is agreed on accordingly."""
        if self.options.buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.options.buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.options.buffer_bytes)

    # ------------------------------------------------------------ what target and initiator use

    def wake(self, connection: Connection) -> None:
        connection.hungry = True
        self._watch(connection)

    def report(self, completion: Completion) -> None:
        if not self._polling and not self._completions:
            os.eventfd_write(self._bell, 1)
        self._completions.append(completion)

    def redial(self, remote: Remote, pause_s: float) -> None:
        self._timer.later(pause_s, lambda: self._initiator.redial(remote))
