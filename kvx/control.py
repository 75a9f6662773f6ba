"""kvx's own control channel: envelopes over TCP, each behind its length in four bytes, big-endian.

One thread drives it (the runtime's) and no call of it blocks. Only the lookup of a host name
borrows a thread for its duration, since the resolver of the C library cannot be waited for.
Whatever one peer does or fails to do costs that peer its link and nothing else: each link has
buffers of its own, with a bound, and `poll` does a bounded amount of work for each.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum

from attrs import define, field

from kvx.address import format_address, parse_address
from kvx.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvx.core.events import PeerLost, PeerUp, Received
from kvx.core.messages import Envelope
from kvx.core.wire import MAX_FRAME, MAX_FRAME_UNPROVEN, decode, encode
from kvx.sockets import Bell, Lookups, Place, find, is_loopback, listen_on

MAX_OUTBOX = 64 << 20
"""Bytes that may wait for a peer that does not read; beyond them its link is dropped."""
MAX_UNPROVEN = 64
"""Accepted links without proof at one time. The oldest makes room, so idle ones keep nobody out."""

_CHUNK = 256 << 10
_FRAMES_PER_LINK = 64
_FRAMES_PER_POLL = 512
_READY_PER_POLL = 64
_ACCEPTS_PER_POLL = 64
_ACCEPT_PAUSE_S = 0.1
_LINGER_S = 1.0
_HEADER = struct.Struct(">I")
_HEARD = select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP

_log = logging.getLogger(__name__)

ControlEvent = PeerUp | PeerLost | Received


class _State(Enum):
    DIALLING = "dialling"
    OPEN = "open"
    CLOSING = "closing"


@define(eq=False)
class _Link:
    """One connection. `peer` names it in logs; `places` are the addresses still to be tried."""

    number: int
    address: str | None
    peer: str
    state: _State
    sock: socket.socket | None = None
    watched: int = 0
    proven: bool = False
    places: deque[Place] = field(factory=deque)
    refused: bool = True
    dial_until: float = 0.0
    inbox: bytearray = field(factory=bytearray)
    outbox: bytearray = field(factory=bytearray)


class ControlChannel:
    """Listens, dials, and carries envelopes. A link is a number that is never used again.

    `listen` is HOST:PORT, port 0 picks a free one. A peer has `handshake_s` seconds to accept a
    connection, and as long again to prove who it is (`proven`). With `loopback_only` neither end
    of a link may be another machine. Raises ConfigError where it cannot listen.
    """

    def __init__(
        self, listen: str, *, handshake_s: float, clock: Callable[[], float], loopback_only: bool = False
    ) -> None:
        self._handshake_s = handshake_s
        self._clock = clock
        self._loopback_only = loopback_only
        self._listener = listen_on(listen, loopback_only=loopback_only)
        self.address = format_address(*self._listener.getsockname()[:2])
        """What it really listens on."""
        self.stats = dict.fromkeys(("accepted", "dialled", "frames_in", "frames_out", "bad_frames", "dropped"), 0)
        """Counters; `dropped` are the links that this side gave up because of what the peer did."""
        self._epoll = select.epoll()
        self._bell = Bell()
        self._lookups = Lookups(self._bell)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._accept_again: float | None = None
        self._next_link = 1
        self._links: dict[int, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        self._timed: dict[int, float] = {}
        self._unproven: dict[int, _Link] = {}
        self._backlog: dict[int, _Link] = {}
        self._events: list[ControlEvent] = []
        self._closed = False

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to do."""
        return self._epoll.fileno()

    def deadline(self) -> float | None:
        """The time of `clock` at which `poll` must be called again even if nothing arrives."""
        times = list(self._timed.values())
        if self._accept_again is not None:
            times.append(self._accept_again)
        return min(times, default=None)

    def connect(self, address: str) -> None:
        """Dial; PeerUp or PeerLost with this address follows from `poll`."""
        if self._closed:
            return
        link = self._new_link(address, address, _State.DIALLING)
        link.dial_until = self._timed[link.number] = self._clock() + self._handshake_s
        try:
            host, port = parse_address(address)
        except ConfigError as error:
            self._lose(link, str(error))
            return
        try:
            self._dial(link, find(host, port, numeric=True))
        except (OSError, UnicodeError):
            if not self._lookups.start(link.number, host, port):
                self._lose(link, "too many host names are being looked up")

    def send(self, link: int, envelope: Envelope) -> None:
        """Queue one envelope. A link that is gone takes it without a word: PeerLost tells of it."""
        known = self._links.get(link)
        if known is None or known.state is not _State.OPEN:
            return
        try:
            data = encode(envelope)
        except LocalProtocolError as error:
            self._lose(known, f"cannot send {type(envelope.message).__name__}: {error}")
            return
        if len(known.outbox) + len(data) > MAX_OUTBOX:
            self.stats["dropped"] += 1
            self._lose(known, f"does not read: {len(known.outbox)} bytes wait for it")
            return
        known.outbox += _HEADER.pack(len(data)) + data
        self.stats["frames_out"] += 1
        if len(known.outbox) == _HEADER.size + len(data):
            self._flush(known)

    def disconnect(self, link: int, detail: str) -> None:
        """Close a link; nothing of it is reported any more.

        What is queued is still sent, and the socket stays for up to a second until the peer has
        closed too: closed at once it could take back a refusal that the peer has not read yet.
        """
        self._events = [event for event in self._events if event.link != link]
        known = self._links.get(link)
        if known is None:
            return
        _log.debug("closing the link to %s: %s", known.peer, detail)
        if known.state is not _State.OPEN:
            self._forget(known)
            return
        known.state = _State.CLOSING
        self._backlog.pop(link, None)
        self._timed[link] = self._clock() + _LINGER_S
        self._limit_unproven(known)
        self._flush(known)

    def proven(self, link: int) -> None:
        """The peer has shown who it is: larger frames are allowed, its time limit ends."""
        known = self._links.get(link)
        if known is not None and known.state is _State.OPEN:
            known.proven = True
            self._timed.pop(link, None)
            self._unproven.pop(link, None)

    def poll(self) -> list[ControlEvent]:
        """Do what can be done now, and tell what happened, in order. Never blocks."""
        if self._closed:
            return []
        self._bell.hush()
        listening = self._listener.fileno()
        # Which link a descriptor belongs to is settled first: after a close it may name another one.
        heard = [(fd, mask, self._by_fd.get(fd)) for fd, mask in self._epoll.poll(0, _READY_PER_POLL)]
        waiting = self._backlog.copy()
        for waiter in waiting.values():
            self._parse(waiter)
        for fd, mask, link in heard:
            if fd == listening:
                self._accept()
            elif link is not None:
                self._ready(link, mask & ~_HEARD if link.number in waiting else mask)
        for number, found in self._lookups.take():
            self._looked_up(number, found)
        self._expire(self._clock())
        if self._backlog:
            self._bell.ring()
        events, self._events = self._events, []
        return events

    def hang_up(self) -> bool:
        """Disconnect every link; whether none is left. Poll and ask again: each ends within its linger time."""
        for number in [number for number, link in self._links.items() if link.state is not _State.CLOSING]:
            self.disconnect(number, "closing down")
        return not self._links

    def close(self) -> None:
        """Close every socket at once; what the kernel has taken is still sent. May be called twice."""
        if self._closed:
            return
        for link in list(self._links.values()):
            self._forget(link)
        self._closed = True
        self._listener.close()
        self._epoll.close()
        self._bell.close()

    # ------------------------------------------------------------------------ opening

    def _new_link(self, address: str | None, peer: str, state: _State) -> _Link:
        link = self._links[self._next_link] = _Link(self._next_link, address, peer, state)
        self._next_link += 1
        return link

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                sock, source = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # the connection was gone before it was taken
                _log.warning("cannot accept for %s s: %s", _ACCEPT_PAUSE_S, error)
                self._epoll.modify(self._listener, 0)
                self._accept_again = self._clock() + _ACCEPT_PAUSE_S
                return
            link = self._new_link(None, format_address(*source[:2]), _State.OPEN)
            self.stats["accepted"] += 1
            self._opened(link, sock)
            self._limit_unproven(link)

    def _limit_unproven(self, link: _Link) -> None:
        """Note a link that nobody has vouched for; the oldest of too many goes."""
        self._unproven[link.number] = link
        if len(self._unproven) > MAX_UNPROVEN:
            self.stats["dropped"] += 1
            self._lose(next(iter(self._unproven.values())), "too many peers that have not proven themselves")

    def _looked_up(self, number: int, found: list[Place] | Exception) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if isinstance(found, Exception):
            self._lose(link, f"cannot find the host: {found}")
        else:
            self._dial(link, found)

    def _dial(self, link: _Link, places: list[Place]) -> None:
        link.places.extend(places)
        self._dial_next(link, "it has no address")

    def _dial_next(self, link: _Link, detail: str) -> None:
        """Try the next address of the host; `detail` says why the last one did not do."""
        while link.places:
            now = self._clock()
            self._timed[link.number] = now + (link.dial_until - now) / len(link.places)
            family, place = link.places.popleft()
            if self._loopback_only and not is_loopback(place):
                link.refused, detail = False, f"{place[0]} is not loopback, and there is no secret"
                continue
            try:
                link.sock = socket.socket(family, socket.SOCK_STREAM)
                link.sock.setblocking(False)
                status = link.sock.connect_ex(place)
            except OSError as error:
                link.refused, detail = False, str(error)
                self._close_socket(link)
                continue
            if status in (0, errno.EINPROGRESS):
                self._by_fd[link.sock.fileno()] = link
                self._watch(link, link.sock, select.EPOLLOUT)
                return
            link.refused, detail = link.refused and status == errno.ECONNREFUSED, os.strerror(status)
            self._close_socket(link)
        self._lose(link, f"cannot connect: {detail}", refused=link.refused)

    def _dialled(self, link: _Link, sock: socket.socket) -> None:
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            link.refused = link.refused and status == errno.ECONNREFUSED
            self._close_socket(link)
            self._dial_next(link, os.strerror(status))
            return
        link.state = _State.OPEN
        self.stats["dialled"] += 1
        self._opened(link, sock)

    def _opened(self, link: _Link, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.sock = sock
        self._by_fd[sock.fileno()] = link
        self._watch(link, sock, select.EPOLLIN)
        self._timed[link.number] = self._clock() + self._handshake_s
        self._events.append(PeerUp(link.number, link.address))

    # --------------------------------------------------------------- reading and writing

    def _ready(self, link: _Link, mask: int) -> None:
        if (sock := link.sock) is None:
            return
        if link.state is _State.DIALLING:
            self._dialled(link, sock)
            return
        if mask & _HEARD:
            self._receive(link, sock)
        if mask & select.EPOLLOUT:
            self._flush(link)

    def _receive(self, link: _Link, sock: socket.socket) -> None:
        try:
            data = sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(link, str(error))
            return
        if not data:
            self._lose(link, "closed by the peer" + (" inside a frame" if link.inbox else ""))
        elif link.state is _State.OPEN:
            link.inbox += data
            self._parse(link)

    def _parse(self, link: _Link) -> None:
        """Take frames out of the inbox. What the bounds leave for the next poll is the backlog."""
        self._backlog.pop(link.number, None)
        at = taken = 0
        inbox = link.inbox
        while len(inbox) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(inbox, at)
            if length > (MAX_FRAME if link.proven else MAX_FRAME_UNPROVEN):
                if not taken or length > MAX_FRAME:
                    self._reject(link, f"frame of {length} bytes")
                    return
                self._backlog[link.number] = link  # a frame before it may be the proof
                break
            end = at + _HEADER.size + length
            if len(inbox) < end:
                break
            if taken == _FRAMES_PER_LINK or len(self._events) >= _FRAMES_PER_POLL:
                self._backlog[link.number] = link
                break
            try:
                envelope = decode(inbox[at + _HEADER.size : end])
            except RemoteProtocolError as error:
                self._reject(link, str(error))
                return
            self._events.append(Received(link.number, envelope))
            self.stats["frames_in"] += 1
            taken += 1
            at = end
        del inbox[:at]

    def _flush(self, link: _Link) -> None:
        if (sock := link.sock) is None:
            return
        try:
            if link.outbox:
                with memoryview(link.outbox) as waiting, waiting[:_CHUNK] as piece:
                    sent = sock.send(piece, socket.MSG_NOSIGNAL)
                del link.outbox[:sent]
            if link.state is _State.CLOSING and not link.outbox:
                sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(link, str(error))
            return
        self._watch(link, sock, select.EPOLLIN | (select.EPOLLOUT if link.outbox else 0))

    def _watch(self, link: _Link, sock: socket.socket, mask: int) -> None:
        if not link.watched:
            self._epoll.register(sock, mask)
        elif link.watched != mask:
            self._epoll.modify(sock, mask)
        link.watched = mask

    # ------------------------------------------------------------------------- closing

    def _expire(self, now: float) -> None:
        if self._accept_again is not None and now >= self._accept_again:
            self._accept_again = None
            self._epoll.modify(self._listener, select.EPOLLIN)
        for number in [number for number, at in self._timed.items() if now >= at]:
            link = self._links[number]
            if link.state is _State.DIALLING:
                link.refused = False
                self._close_socket(link)
                self._dial_next(link, "no answer in time")
            else:
                if link.state is _State.OPEN:
                    self.stats["dropped"] += 1
                self._lose(link, f"no proof of who it is in {self._handshake_s:g} s")

    def _reject(self, link: _Link, detail: str) -> None:
        self.stats["bad_frames"] += 1
        _log.warning("bad bytes from %s: %s", link.peer, detail)
        self._lose(link, f"bad bytes: {detail}")

    def _lose(self, link: _Link, detail: str, *, refused: bool = False) -> None:
        self._forget(link)
        if link.state is not _State.CLOSING:
            self._events.append(PeerLost(link.number, link.address, refused, detail))
            self._bell.ring()

    def _forget(self, link: _Link) -> None:
        self._close_socket(link)
        for table in (self._links, self._timed, self._unproven, self._backlog):
            table.pop(link.number, None)

    def _close_socket(self, link: _Link) -> None:
        if link.sock is None:
            return
        if link.watched:
            # Closing is not enough: a forked child may hold the same connection.
            self._epoll.unregister(link.sock)
            link.watched = 0
        self._by_fd.pop(link.sock.fileno(), None)
        link.sock.close()
        link.sock = None
