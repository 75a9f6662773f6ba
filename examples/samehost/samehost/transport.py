"""The transport: a WRITE is carried out by its target, which fetches the bytes from the initiator's memory.

A write from outside could be neither checked nor taken back by its victim. Here the initiator sends a word that says
where its pieces lie, and whoever owns the destination does the copying: what it has not permitted it does not fetch,
and once it has stopped nothing lands. The kernel names the process at the other end of a socket, and an open
`/proc/PID/mem` stays with that process. Only processes of one user are listened to; they could trace each other anyway.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from select import EPOLLHUP, EPOLLIN, epoll
from socket import AF_UNIX, SO_PEERCRED, SOCK_SEQPACKET, SOL_SOCKET, socket
from typing import Any

import msgspec
import numpy as np
from attrs import define, field

from kvx.core.errors import ConfigError, TransportError
from kvx.core.events import Forbidden, OpDone, OpFailed
from kvx.core.model import Access, Capabilities, Descriptors, FenceScope, InstanceInfo, Op, Peer, Reason, Region, Stamp
from kvx.memory import Int64s, Memory, Ranges
from kvx.transport import Completion

FROM_KVX = {"peer", "listen_host", "advertise_host", "secret", "insecure"}
"""Keys of every section. Only `peer` matters here: who may come is decided by the kernel, and nothing has a port."""
PREFIX, NAME_BYTES, WORD_BYTES = b"\0samehost-", 42, 4096
MAX_PIECES, CHUNK_BYTES, IN_FLIGHT = 1 << 18, 1 << 20, 32
"""IN_FLIGHT words fit into a socket whose other end stands still."""


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """`peer` asks. Rows of the table in its memory: your region and offset, length, its own address."""

    peer: str
    op_id: int
    stamp: Stamp
    table: int
    rows: int


class Fetched(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """All is there; or there is a problem, and nothing lands any more."""

    op_id: int
    problem: str = ""


@define(eq=False)
class Line:
    """A connection to the socket `dialled` (empty: the other end has dialled); `memory` is its process's."""

    sock: socket
    memory: int
    dialled: bytes
    posted: dict[int, Int64s] = field(factory=dict)
    """This side's operations that are not over, and their tables, which the other end reads."""
    waiting: deque[Fetch] = field(factory=deque)
    fetching: Iterator[Fetched | None] | None = None


class SameHost:
    """See `kvx.transport.Transport`."""

    capabilities = Capabilities(
        frozenset({Op.WRITE}), Access.GRANT, FenceScope.NONE, False, max_descriptors=MAX_PIECES, max_in_flight=IN_FLIGHT
    )
    idle_poll_s: float | None = None

    def __init__(self, section: Mapping[str, Any]) -> None:
        if unknown := section.keys() - FROM_KVX:
            raise ConfigError(f"samehost has no option {min(unknown)!r}")
        self._name, self._socket = str(section.get("peer", "")), PREFIX + os.urandom(16).hex().encode()
        self._memory = Memory(())
        self._listener, self._epoll = socket(AF_UNIX, SOCK_SEQPACKET), epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, EPOLLIN)
        self._peers: dict[str, bytes] = {}
        self._lines: dict[int, Line] = {}
        self._told: list[Completion] = []
        self._permits: dict[str, dict[tuple[str | None, Stamp], Ranges]] = {}

    def register(self, regions: Sequence[Region]) -> None:
        if self._epoll.closed or self._listener.getsockname():
            raise TransportError("memory is registered once, before anything else")
        self._memory = Memory(regions)
        self._listener.bind(self._socket)
        self._listener.listen(128)
        self._epoll.register(self._listener, EPOLLIN)

    def metadata(self) -> bytes:
        return self._socket

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        if len(metadata) != NAME_BYTES or not metadata.startswith(PREFIX):
            raise TransportError("this is no metadata of samehost")
        old, self._peers[str(info.peer)] = self._peers.get(str(info.peer)), metadata
        for line in [line for line in self._lines.values() if line.dialled == old != metadata]:
            self._drop(line, "another start of this peer is there")

    # ------------------------------------------------------------ a target

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        if op is Op.WRITE:
            key = (str(peer) if peer else None, stamp)
            self._permits.setdefault(transfer, {}).setdefault(key, Ranges()).add(*self._memory.stretches(ranges))

    def forbid(self, transfer: str) -> None:
        self._permits.pop(transfer, None)
        self._tell(Forbidden(transfer))

    def fence(self, peer: Peer, generation: int) -> None:
        """Not declared: `forbid` does what is needed."""

    def _permitted(self, word: Fetch, starts: Int64s, ends: Int64s) -> bool:
        known = self._permits.get(word.stamp.transfer, {})
        keys = {(word.peer, word.stamp), (None, word.stamp)} & known.keys()
        return any(known[key].cover(starts, ends) for key in keys)

    def _fetch(self, memory: int, word: Fetch) -> Iterator[Fetched | None]:
        """None before each further chunk, which looks at its permits again; at last the answer."""
        try:
            table = np.frombuffer(os.pread(memory, 32 * word.rows, word.table), dtype=np.int64).reshape(word.rows, 4)
            pieces = Descriptors(*table.T[:3])
            starts, ends = self._memory.stretches(pieces)
            if not self._permitted(word, starts, ends):
                raise TransportError("not permitted")
            slot, left = self._memory.locate(pieces), CHUNK_BYTES
            views = self._memory.cut(slot.tolist(), pieces.offset.tolist(), pieces.length.tolist())
            for view, address in zip(views, table[:, 3].tolist(), strict=True):
                for start in range(0, len(view), CHUNK_BYTES):
                    if left <= 0:
                        left = CHUNK_BYTES
                        yield None
                        if not self._permitted(word, starts, ends):
                            raise TransportError("not permitted any more")
                    part = view[start : start + CHUNK_BYTES]
                    left -= len(part)
                    if os.preadv(memory, [part], address + start) < len(part):
                        raise TransportError("the initiator's memory ends there")
            yield Fetched(word.op_id)
        except (TransportError, OSError, ValueError) as error:
            yield Fetched(word.op_id, str(error))

    # ------------------------------------------------------------ an initiator

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        try:
            if op is not Op.WRITE or len(local) > MAX_PIECES or not np.array_equal(local.length, remote.length):
                raise TransportError("no WRITE, too many pieces, or pieces that differ")
            here = self._memory.addresses(local)
            line = self._line_to(peer)
        except (TransportError, OSError) as error:
            self._tell(OpFailed(op_id, Reason.TRANSPORT, str(error)))
            return
        table = line.posted[op_id] = np.stack((remote.region, remote.offset, remote.length, here), axis=1)
        line.waiting.append(Fetch(self._name, op_id, stamp, table.ctypes.data, len(table)))
        self._say_waiting(line)

    def cancel(self, op_id: int) -> None:
        """Not declared: it ends as it would have."""

    def _line_to(self, peer: Peer) -> Line:
        """Raises TransportError and OSError."""
        if (name := self._peers.get(str(peer))) is None:
            raise TransportError(f"nobody has introduced {peer}")
        for line in self._lines.values():
            if line.dialled == name:
                return line
        sock = socket(AF_UNIX, SOCK_SEQPACKET)
        sock.connect(name)
        return self._add(sock, name)

    def _say_waiting(self, line: Line) -> None:
        while line.waiting and len(line.posted) - len(line.waiting) < IN_FLIGHT:
            self._say(line, line.waiting.popleft())

    # ------------------------------------------------------------ lines

    def poll(self) -> list[Completion]:
        for number, event in [] if self._epoll.closed else self._epoll.poll(0):
            if number == self._bell:
                os.eventfd_read(self._bell)
            elif number == self._listener.fileno():
                with contextlib.suppress(OSError):  # it has left again, or is none of ours
                    self._add(self._listener.accept()[0], b"")
            elif (line := self._lines.get(number)) and event & EPOLLHUP:
                self._drop(line, "it has left")  # and is not fetched from any more
            elif line and not line.fetching:
                self._listen(line)
        for line in list(self._lines.values()):
            if line.fetching and (answer := next(line.fetching)):
                line.fetching = None
                self._say(line, answer)
            elif line.fetching:
                os.eventfd_write(self._bell, 1)
        told, self._told = self._told, []
        return told

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if not self._epoll.closed:
            for line in list(self._lines.values()):
                self._drop(line, "closed")
            self._told.clear()
            self._listener.close()
            self._epoll.close()
            os.close(self._bell)

    def _tell(self, completion: Completion) -> None:
        self._told.append(completion)
        os.eventfd_write(self._bell, 1)

    def _add(self, sock: socket, dialled: bytes) -> Line:
        """Raises OSError for a process of another user, or one whose memory cannot be read."""
        try:
            sock.setblocking(False)
            pid, user, _ = struct.unpack("iII", sock.getsockopt(SOL_SOCKET, SO_PEERCRED, 12))
            if user != os.getuid():
                raise PermissionError(f"process {pid} is another user's")
            line = Line(sock, os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC), dialled)
        except OSError:
            sock.close()
            raise
        self._epoll.register(sock, EPOLLIN)
        self._lines[sock.fileno()] = line
        return line

    def _say(self, line: Line, word: Fetch | Fetched) -> None:
        try:
            line.sock.send(msgspec.msgpack.encode(word))
        except OSError as error:
            self._drop(line, str(error))

    def _listen(self, line: Line) -> None:
        try:
            word = msgspec.msgpack.decode(line.sock.recv(WORD_BYTES), type=Fetch | Fetched)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            word = None
        match word:
            case Fetch(rows=rows) if 0 <= rows <= MAX_PIECES and not line.dialled:
                line.fetching = self._fetch(line.memory, word)
            case Fetched(op_id=op_id, problem=problem) if op_id in line.posted:
                nbytes = int(line.posted.pop(op_id)[:, 2].sum())
                self._tell(OpFailed(op_id, Reason.TRANSPORT, problem) if problem else OpDone(op_id, nbytes))
                self._say_waiting(line)
            case _:
                self._drop(line, "it has left, or says what it may not")

    def _drop(self, line: Line, why: str) -> None:
        if self._lines.pop(line.sock.fileno(), None):
            line.sock.close()
            os.close(line.memory)
            while line.posted:
                self._tell(OpFailed(line.posted.popitem()[0], Reason.PEER_LOST, why))
