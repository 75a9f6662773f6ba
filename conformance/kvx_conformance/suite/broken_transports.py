"""Transports that are broken on purpose, each in one way, around a correct one: what the transport cases must find.

Named as `kvx_conformance.suite.broken_transports:NAME`. Where bytes have to go astray, they do so within this
process: these transports know one another's memory, and are of no use between processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvx.core.errors import TransportError
from kvx.core.events import Fenced, Forbidden, OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Region, Stamp
from kvx.transport import Completion
from kvx_conformance.faults import Wrapper
from kvx_conformance.suite.broken import Broken
from kvx_conformance.suite.broken_declarations import BROKEN_DECLARATIONS
from kvx_conformance.suite.correct_transports import CORRECT_TRANSPORTS
from kvx_conformance.suite.subject import Subject

__all__ = ["BROKEN_TRANSPORTS", "CORRECT_TRANSPORTS"]

HANG_S = 3.0
"""How long what hangs hangs: longer than a case allows, and not for ever, so that others can still run."""
LATE_S = 0.05
_BLOCK_S = 0.5
_PAUSE_S = 0.005
_LEAK = 256
"""So many leaked descriptors at most, so that the process which runs the cases can go on."""


class _Bent(Wrapper):
    """Tells of its own accord, too, and knows where the memory of its kind lies in this process."""

    _places: dict[str, dict[int, Region]] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.name = str(options.get("peer", ""))
        self.told: list[Completion] = []

    @property
    def idle_poll_s(self) -> float | None:
        return _PAUSE_S

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._places[self.name] = {region.index: region for region in regions}

    def poll(self) -> list[Completion]:
        told, self.told = self.told, []
        return told + self.inner.poll()

    def close(self) -> None:
        super().close()
        self._places.pop(self.name, None)

    def behind(self, peer: str, pieces: Descriptors) -> int:
        """The address behind the last piece, or 0 where that is none of this process's registered memory."""
        region, offset, length = pieces.pieces()[-1] if len(pieces) else (0, 0, 0)
        place = self._places.get(peer, {}).get(region)
        inside = place is not None and length > 0 and offset >= 0 and offset + length <= place.length
        return place.base + offset + length if place and inside else 0


class WritesNothing(_Bent):
    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if str(peer) in self._places and len(local) == len(remote) and local.nbytes:
            self.told.append(OpDone(op_id, local.nbytes))
        else:
            self.inner.post(op_id, peer, op, local, remote, stamp)


class OneBlockLate(_Bent):
    """Tells the end when all pieces but the last are there; the last one follows LATE_S later."""

    _OWN = 1 << 40

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._bytes: dict[int, int] = {}

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if len(local) < 2 or len(local) != len(remote):
            self.inner.post(op_id, peer, op, local, remote, stamp)
            return
        post, last, most = self.inner.post, slice(-1, None), slice(None, -1)
        self._bytes[op_id] = local.nbytes
        self.inner.post(op_id, peer, op, _cut(local, most), _cut(remote, most), stamp)
        late = self._OWN + op_id, peer, op, _cut(local, last), _cut(remote, last), stamp
        self._later.append((time.monotonic() + LATE_S, lambda: post(*late)))

    def poll(self) -> list[Completion]:
        now = time.monotonic()
        for due, start in self._later:
            if due <= now:
                start()
        self._later = [one for one in self._later if one[0] > now]
        told = [one for one in super().poll() if getattr(one, "op_id", 0) < self._OWN]
        return [
            OpDone(one.op_id, self._bytes.get(one.op_id, one.nbytes)) if isinstance(one, OpDone) else one
            for one in told
        ]


class CompletesEarly(_Bent):
    """Its OpDone says that the bytes are on their way."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._early: set[int] = set()

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.inner.post(op_id, peer, op, local, remote, stamp)
        if str(peer) in self._places and local.nbytes > 1 << 16:
            self._early.add(op_id)
            self.told.append(OpDone(op_id, local.nbytes))

    def poll(self) -> list[Completion]:
        told, self.told = self.told, []
        return told + [one for one in self.inner.poll() if getattr(one, "op_id", None) not in self._early]


class OnePieceTooMany(_Bent):
    """Behind the last piece it writes as many bytes again, up to 64."""

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.inner.post(op_id, peer, op, local, remote, stamp)
        if op is Op.WRITE and (place := self.behind(str(peer), remote)):
            ctypes.memset(place, 0x5A, min(64, int(remote.length[-1])))


class OneByteOff(_Bent):
    """Pieces go to where they belong, but for one byte: long ones begin one byte too far."""

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        off = remote
        if len(remote) == len(local) == 1 and remote.length[0] > 256 and remote.length[0] == local.length[0]:
            here, there, size = int(local.offset[0]), int(remote.offset[0]), int(remote.length[0])
            local = Descriptors.of([(int(local.region[0]), here, size - 1)])
            off = Descriptors.of([(int(remote.region[0]), there + 1, size - 1)])
        self.inner.post(op_id, peer, op, local, off, stamp)


class CompletesTwice(_Bent):
    def poll(self) -> list[Completion]:
        told = super().poll()
        self.told = [one for one in told if isinstance(one, OpDone) and one not in self._again]
        self._again = self.told
        return told

    _again: Sequence[Completion] = ()


class IgnoresCancel(_Bent):
    """A cancelled operation is forgotten: it moves on, and its end is never told."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._forgotten: set[int] = set()

    def cancel(self, op_id: int) -> None:
        self._forgotten.add(op_id)

    def poll(self) -> list[Completion]:
        return [one for one in super().poll() if getattr(one, "op_id", None) not in self._forgotten]


class OverdeclaresCancel(Wrapper):
    """`cancel` is declared and does nothing."""

    def cancel(self, op_id: int) -> None:
        """Nothing."""


class IgnoresForbid(_Bent):
    def forbid(self, transfer: str) -> None:
        self.told.append(Forbidden(transfer))


class ForbidsLate(_Bent):
    """Says Forbidden when asked, and is in force LATE_S later."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._later: list[tuple[float, str]] = []

    def forbid(self, transfer: str) -> None:
        self.told.append(Forbidden(transfer))
        self._later.append((time.monotonic() + LATE_S, transfer))

    def poll(self) -> list[Completion]:
        now = time.monotonic()
        for due, transfer in self._later:
            if due <= now:
                self.inner.forbid(transfer)
        self._later = [one for one in self._later if one[0] > now]
        early = {one[1] for one in self._later}
        told = super().poll()
        return [one for one in told if not isinstance(one, Forbidden) or one.transfer in early]


class IgnoresFence(_Bent):
    def fence(self, peer: Peer, generation: int) -> None:
        self.told.append(Fenced(peer, generation))


class PermitsEverything(_Bent):
    """Whoever shows a transfer that was permitted at all may use all memory."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._all = Descriptors.of((region.index, 0, region.length) for region in regions)

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        self.inner.permit(transfer, None, op, self._all, stamp)


class IgnoresStamps(_Bent):
    """Operations of an old generation pass: every stamp is shown, and permitted, without its generation and epoch."""

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        self.inner.permit(transfer, peer, op, ranges, Stamp(transfer, 0, 1 << 32))

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.inner.post(op_id, peer, op, local, remote, Stamp(stamp.transfer, 0, 1 << 32))


class Spins(Wrapper):
    """`fileno` is a descriptor that is readable for ever."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._near, self._far = socket.socketpair()
        self._far.send(b"x")

    def fileno(self) -> int | None:
        return self._near.fileno()

    def close(self) -> None:
        super().close()
        self._near.close()
        self._far.close()


class TellsNobody(Wrapper):
    """`fileno` never becomes readable."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._near, self._far = socket.socketpair()

    def fileno(self) -> int | None:
        return self._near.fileno()

    def close(self) -> None:
        super().close()
        self._near.close()
        self._far.close()


class HangsOnClose(Wrapper):
    _closed = False

    def close(self) -> None:
        super().close()
        if not self._closed:
            self._closed = True
            time.sleep(HANG_S)


class BlocksInPoll(Wrapper):
    """`poll` waits for something to happen."""

    def poll(self) -> list[Completion]:
        told = super().poll()
        if not told:
            time.sleep(_BLOCK_S)
        return told


class SwallowsErrors(_Bent):
    """An operation that fails is told as done."""

    def poll(self) -> list[Completion]:
        return [OpDone(one.op_id) if isinstance(one, OpFailed) else one for one in super().poll()]


class LeaksDescriptors(Wrapper):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._leaked: list[int] = []

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if len(self._leaked) < _LEAK:
            self._leaked.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        super().post(op_id, peer, op, local, remote, stamp)

    def close(self) -> None:
        super().close()
        while self._leaked:
            os.close(self._leaked.pop())


class RaisesFromPost(_Bent):
    """What is impossible is answered by an exception."""

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if str(peer) not in self._places:
            raise TransportError(f"{peer} is not known")
        if not np.array_equal(local.length, remote.length) or (len(local) and int(local.length.min()) < 0):
            raise TransportError("the pieces differ")
        self.inner.post(op_id, peer, op, local, remote, stamp)


class LosesWhenFull(_Bent):
    """A post beyond `max_in_flight` is lost."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._open: set[int] = set()

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if len(self._open) < self.capabilities.max_in_flight:
            self._open.add(op_id)
            self.inner.post(op_id, peer, op, local, remote, stamp)

    def poll(self) -> list[Completion]:
        told = super().poll()
        self._open -= {one.op_id for one in told if isinstance(one, OpDone | OpFailed)}
        return told


class QueuesBackwards(_Bent):
    """Posts beyond `max_in_flight` wait, and the last one is started first."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._open: set[int] = set()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        post = self.inner.post
        self._waiting.append((op_id, lambda: post(op_id, peer, op, local, remote, stamp)))
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._open) < self.capabilities.max_in_flight:
            op_id, start = self._waiting.pop()
            self._open.add(op_id)
            start()

    def poll(self) -> list[Completion]:
        told = super().poll()
        self._open -= {one.op_id for one in told if isinstance(one, OpDone | OpFailed)}
        self._start()
        return told


class IgnoresRestarts(Wrapper):
    """Of a peer's second start it learns nothing."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._known: set[Peer] = set()

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        if info.peer not in self._known:
            super().connect(info, metadata)
            self._known.add(info.peer)


class AcceptsJunk(Wrapper):
    """`connect` says nothing of metadata that it cannot use."""

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        with contextlib.suppress(TransportError):
            super().connect(info, metadata)


def _cut(pieces: Descriptors, part: slice) -> Descriptors:
    return Descriptors(pieces.region[part], pieces.offset[part], pieces.length[part])


def _broken(kind: type[Wrapper], cause: str, *found_by: str) -> Broken:
    return Broken(Subject(f"{__name__}:{kind.__name__}"), cause, found_by)


BROKEN_TRANSPORTS: Mapping[str, Broken] = {
    "writes-nothing": _broken(WritesNothing, "It tells OpDone and moves no byte.", "KVX-TRN-004.one-piece"),
    "one-block-late": _broken(
        OneBlockLate, "It tells OpDone 50 ms before the last piece is there.", "KVX-TRN-004.scattered", "KVX-TRN-012"
    ),
    "completes-early": _broken(
        CompletesEarly, "It tells OpDone when the bytes have only been sent for.", "KVX-TRN-012.at-that-moment"
    ),
    "one-piece-too-many": _broken(
        OnePieceTooMany, "It writes beyond the end of the last piece.", "KVX-TRN-004.one-piece-write"
    ),
    "one-byte-off": _broken(OneByteOff, "It puts long pieces one byte beside their place.", "KVX-TRN-004.one-piece"),
    "completes-twice": _broken(CompletesTwice, "It tells each OpDone twice.", "KVX-TRN-011.each-once"),
    "swallows-errors": _broken(
        SwallowsErrors, "It tells OpDone of operations that have failed.", "KVX-TRN-007", "KVX-TRN-014.no-permit"
    ),
    "raises-from-post": _broken(
        RaisesFromPost, "It answers an impossible request with an exception.", "KVX-TRN-008", "KVX-TRN-009"
    ),
    "permits-everything": _broken(
        PermitsEverything, "A target admits any peer to all of its memory.", "KVX-TRN-014.ranges", "KVX-TRN-014.peer"
    ),
    "ignores-stamps": _broken(IgnoresStamps, "A target does not look at epoch and generation.", "KVX-TRN-014.stamp"),
    "ignores-forbid": _broken(
        IgnoresForbid, "It tells Forbidden, and the operations go on.", "KVX-TRN-015.midway", "KVX-TRN-015.each-step"
    ),
    "forbids-late": _broken(
        ForbidsLate, "It tells Forbidden 50 ms before it is in force.", "KVX-TRN-015.before-the-post"
    ),
    "loses-when-full": _broken(LosesWhenFull, "A post beyond `max_in_flight` is lost.", "KVX-TRN-017.more-than-fit"),
    "queues-backwards": _broken(
        QueuesBackwards, "Of the posts beyond `max_in_flight` the last is started first.", "KVX-TRN-017.in-order"
    ),
    "ignores-cancel": _broken(
        IgnoresCancel, "A cancelled operation moves on, and its end is never told.", "KVX-TRN-021.midway", "KVX-TRN-013"
    ),
    "overdeclares-cancel": _broken(
        OverdeclaresCancel, "It declares `cancel`, which does nothing.", "KVX-TRN-021.queued"
    ),
    "ignores-fence": _broken(IgnoresFence, "It tells Fenced, and old generations go on.", "KVX-TRN-023.generations"),
    "ignores-restarts": _broken(
        IgnoresRestarts, "It keeps to the metadata of a peer's first start.", "KVX-TRN-025.target-again"
    ),
    "accepts-junk": _broken(AcceptsJunk, "`connect` accepts metadata that it cannot use.", "KVX-TRN-027.junk"),
    "hangs-on-close": _broken(HangsOnClose, "`close` takes three seconds.", "KVX-TRN-029.idle"),
    "leaks-descriptors": _broken(
        LeaksDescriptors, "Each operation opens a descriptor and keeps it.", "KVX-TRN-030.two-hundred"
    ),
    "blocks-in-poll": _broken(BlocksInPoll, "`poll` waits for something to happen.", "KVX-TRN-032.at-rest"),
    "spins": _broken(Spins, "`fileno` is readable all the time.", "KVX-TRN-034.rest"),
    "tells-nobody": _broken(TellsNobody, "`fileno` never becomes readable.", "KVX-TRN-034.told-without-traffic"),
    **BROKEN_DECLARATIONS,
}
