"""Transports that fail on purpose, each around a real one.

They are named in the configuration as `kvx_conformance.faults:NAME`; no switch in the product
does what they do. Options of the section: `inner` names the wrapped transport (by default
`tcp`), the rest is handed on.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from kvx import plugins
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Region, Stamp
from kvx.transport import Access, Capabilities, Completion, FenceScope, Transport

_GATE_POLL_S = 0.01


class Wrapper:
    """Hands everything on; a fault overrides what it breaks."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        section = dict(options)
        self.options = {key: section.pop(key) for key in self.own_options if key in section}
        self.inner: Transport = plugins.make_transport(section.pop("inner", "tcp"), section)

    own_options: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def idle_poll_s(self) -> float | None:
        return self.inner.idle_poll_s

    def register(self, regions: Sequence[Region]) -> None:
        self.inner.register(regions)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        self.inner.connect(info, metadata)

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        self.inner.permit(transfer, peer, op, ranges, stamp)

    def forbid(self, transfer: str) -> None:
        self.inner.forbid(transfer)

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.inner.post(op_id, peer, op, local, remote, stamp)

    def cancel(self, op_id: int) -> None:
        self.inner.cancel(op_id)

    def fence(self, peer: Peer, generation: int) -> None:
        self.inner.fence(peer, generation)

    def poll(self) -> list[Completion]:
        return self.inner.poll()

    def fileno(self) -> int | None:
        return self.inner.fileno()

    def close(self) -> None:
        self.inner.close()


class DropsBytes(Wrapper):
    """Says that every operation is done and moves nothing: the control of each token test.

    With option `regions` only so many regions, the first ones, lose their bytes: an engine may send along what it
    cannot do without.
    """

    own_options = ("regions",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._done: list[Completion] = []

    @property
    def idle_poll_s(self) -> float | None:
        return _GATE_POLL_S

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        kept = local.region >= self.options.get("regions", math.inf)
        if kept.any():
            self.inner.post(op_id, peer, op, _chosen(local, kept), _chosen(remote, kept), stamp)
        else:
            self._done.append(OpDone(op_id, local.nbytes))

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done + self.inner.poll()


def _chosen(pieces: Descriptors, which: NDArray[np.bool_]) -> Descriptors:
    return Descriptors(pieces.region[which], pieces.offset[which], pieces.length[which])


class RegionAccess(Wrapper):
    """A target that can neither forbid nor fence, as over RDMA: only drain and quarantine protect it."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, access=Access.REGION, fence=FenceScope.NONE)

    def forbid(self, transfer: str) -> None:
        """Nothing: whoever holds the address writes on."""

    def fence(self, peer: Peer, generation: int) -> None:
        """Nothing, and no Fenced follows."""


class Gate(Wrapper):
    """Holds posts back while the file of option `gate` exists, after the first `let_through` of each transfer.

    Keeps a transfer in MOVING for as long as a test wants; held posts can be cancelled.
    """

    own_options = ("gate", "let_through")

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._held: deque[tuple[int, str, Callable[[], None]]] = deque()
        self._seen: dict[str, int] = {}
        self._ended: list[Completion] = []

    @property
    def idle_poll_s(self) -> float | None:
        return _GATE_POLL_S

    @property
    def _shut(self) -> bool:
        return os.path.exists(self.options["gate"])

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self._seen[stamp.transfer] = self._seen.get(stamp.transfer, 0) + 1
        start = super().post
        if self._shut and self._seen[stamp.transfer] > int(self.options.get("let_through", 0)):
            self._held.append((op_id, stamp.transfer, lambda: start(op_id, peer, op, local, remote, stamp)))
        else:
            start(op_id, peer, op, local, remote, stamp)

    def cancel(self, op_id: int) -> None:
        for held in self._held:
            if held[0] == op_id:
                self._held.remove(held)
                self._ended.append(OpFailed(op_id, detail="cancelled before it was posted"))
                return
        self.inner.cancel(op_id)

    def poll(self) -> list[Completion]:
        while self._held and not self._shut:
            self._held.popleft()[2]()
        ended, self._ended = self._ended, []
        return ended + self.inner.poll()


class GatedRegionAccess(Gate, RegionAccess):
    """Both: a writer that is held back, and a target that cannot keep it out."""


class StubbornRegionAccess(GatedRegionAccess):
    """What is held back cannot be cancelled either: it ends when the gate opens."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(super().capabilities, cancel=False)


def dropping(options: Mapping[str, Any]) -> Transport:
    return DropsBytes(options)


def region_access(options: Mapping[str, Any]) -> Transport:
    return RegionAccess(options)


def gated(options: Mapping[str, Any]) -> Transport:
    return Gate(options)


def gated_region_access(options: Mapping[str, Any]) -> Transport:
    return GatedRegionAccess(options)
