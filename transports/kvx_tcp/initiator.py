"""The side that posts operations: known peers, one link to each, and the proof after a break."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated, Protocol

import msgspec
from attrs import define, field

from kvx.core.errors import LocalProtocolError, TransportError
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Reason, Stamp
from kvx.memory import Memory
from kvx_tcp.connection import Connection
from kvx_tcp.frames import MAX_PIECE_BYTES, MAX_PIECES, VERSION, Status
from kvx_tcp.handshake import RefusedError
from kvx_tcp.link import Doubt, Link, Operation
from kvx_tcp.span import Span, coalesce

_MAX_PAUSE_S = 2.0
_SCRATCH_BYTES = 256 << 10


class Metadata(msgspec.Struct, frozen=True):
    """What a peer must know to dial this transport."""

    version: int
    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    streams: Annotated[int, msgspec.Meta(ge=1, le=64)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Raises TransportError for anything but valid metadata of this version with a numeric address."""
        try:
            metadata = msgspec.msgpack.decode(data, type=cls)
            ipaddress.ip_address(metadata.host)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransportError(f"the peer's metadata cannot be used: {error}") from error
        if metadata.version != VERSION:
            raise TransportError(f"the peer speaks version {metadata.version}, this is version {VERSION}")
        return metadata

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ipaddress.ip_address(self.host).version == 6 else socket.AF_INET


@define(eq=False)
class Remote:
    """One known peer. `doubts` wait for the peer's word, which a new connection asks for."""

    peer: Peer
    epoch: int
    metadata: Metadata
    link: Link | None = None
    doubts: list[Doubt] = field(factory=list)
    pause_s: float = 0.0


class Shell(Protocol):
    """What the transport does for the initiator."""

    def dial(self, remote: Remote, link: Link) -> None:
        """Open the link's connections. Raises OSError."""

    def drop(self, connection: Connection) -> None: ...

    def wake(self, connection: Connection) -> None:
        """This connection has something to send."""

    def report(self, completion: OpDone | OpFailed) -> None: ...

    def redial(self, remote: Remote, pause_s: float) -> None:
        """Call `Initiator.redial` then."""


class Initiator:
    """Outgoing operations of all peers."""

    def __init__(self, memory: Memory, shell: Shell, chunk_bytes: int) -> None:
        self.remotes: dict[Peer, Remote] = {}
        self._memory = memory
        self._shell = shell
        self._chunk_bytes = chunk_bytes
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._posted: dict[int, tuple[Link, Operation]] = {}

    def connect(self, info: InstanceInfo, metadata: Metadata) -> Metadata | None:
        """Learn of a peer. Another start of a known one ends what went to the old; returns the old metadata."""
        old = self.remotes.get(info.peer)
        if old is not None and (old.epoch, old.metadata) == (info.epoch, metadata):
            return None
        self.remotes[info.peer] = new = Remote(info.peer, info.epoch, metadata)
        if old is None:
            return None
        if old.link is not None:
            self._break(old, old.link, f"{old.peer} has started anew")
        if old.metadata.incarnation == metadata.incarnation:
            new.doubts = old.doubts
            self._shell.redial(new, 0.0)
        else:
            self._conclude(old)
        return old.metadata

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        """Raises LocalProtocolError for an operation id in flight; everything else is an OpFailed."""
        if op_id in self._posted:
            raise LocalProtocolError(f"operation {op_id} is in flight already")
        known = self.remotes.get(peer)
        if known is None:
            self._shell.report(OpFailed(op_id, Reason.TRANSPORT, f"{peer} is not known to the transport"))
            return
        try:
            operation = self._check(op_id, op, local, remote, stamp)
        except TransportError as error:
            self._shell.report(OpFailed(op_id, Reason.BOUNDS, str(error)))
            return
        link = known.link or self._dial(known)
        if isinstance(link, OSError):
            self._shell.report(OpFailed(op_id, Reason.TRANSPORT, f"{peer} cannot be dialled: {link}"))
            return
        self._posted[op_id] = (link, operation)
        link.post(operation)

    def _check(self, op_id: int, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> Operation:
        if len(local) != len(remote) or (local.length != remote.length).any():
            raise TransportError("local and remote pieces differ in number or length")
        self._memory.locate(local)
        if len(remote) and min(remote.region.min(), remote.offset.min()) < 0:
            raise TransportError("a remote piece is negative")
        if len(remote) and max(remote.region.max(), remote.offset.max(), remote.length.max()) > MAX_PIECE_BYTES:
            raise TransportError("a remote piece lies beyond any region")
        local, remote = coalesce(local, remote)
        if len(remote) > MAX_PIECES:
            raise TransportError(f"{len(remote)} pieces; {MAX_PIECES} are possible in one operation")
        return Operation(op_id, op, stamp, Span(self._memory, local), remote)

    def cancel(self, op_id: int) -> None:
        if op_id in self._posted:
            link, operation = self._posted[op_id]
            link.cancel(operation)

    def redial(self, remote: Remote) -> None:
        """Ask again about what is in doubt."""
        if remote.doubts and remote.link is None and self.remotes.get(remote.peer) is remote:
            self._dial(remote)

    def _dial(self, remote: Remote) -> Link | OSError:
        link = Link(
            chunk_bytes=self._chunk_bytes,
            scratch=self._scratch,
            report=self._report,
            wake=self._shell.wake,
            broken=lambda link, cause: self._broken(remote, link, cause),
            settled=lambda doubt: self._settled(remote, doubt),
        )
        remote.link = link
        try:
            self._shell.dial(remote, link)
        except OSError as error:
            self._broken(remote, link, error)
            return error
        return link

    def _report(self, completion: OpDone | OpFailed) -> None:
        self._posted.pop(completion.op_id, None)
        self._shell.report(completion)

    def _settled(self, remote: Remote, doubt: Doubt) -> None:
        """The peer has ended the broken connections: nothing of these writes can land any more."""
        remote.doubts.remove(doubt)
        remote.pause_s = 0.0
        for failed in doubt.failures:
            self._report(failed)

    def _broken(self, remote: Remote, link: Link, cause: Exception) -> None:
        if remote.link is not link:
            return
        self._break(remote, link, f"connection to {remote.peer} lost: {cause}")
        if self._gone(cause):
            self._conclude(remote)
        elif remote.doubts:
            self._shell.redial(remote, remote.pause_s)
            remote.pause_s = min(_MAX_PAUSE_S, 2 * remote.pause_s or 0.05)

    def _break(self, remote: Remote, link: Link, cause: str) -> None:
        remote.link = None
        for connection in link.connections:
            self._shell.drop(connection)
        doubt = link.end(cause)
        if doubt is not None:
            remote.doubts.append(doubt)

    def _gone(self, cause: Exception) -> bool:
        """Does this show that the peer's transport is no more? A dead one reads nothing from its sockets."""
        if isinstance(cause, RefusedError):
            return cause.proven and cause.status is Status.STALE
        return isinstance(cause, ConnectionRefusedError)

    def _conclude(self, remote: Remote) -> None:
        for doubt in list(remote.doubts):
            self._settled(remote, doubt)
