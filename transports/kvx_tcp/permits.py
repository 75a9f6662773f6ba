"""What this rank permits to its peers: a pure table that answers one question per operation."""

from __future__ import annotations

import numpy as np
from attrs import define

from kvx.core.model import Op, Stamp
from kvx.memory import Int64s
from kvx_tcp.frames import Status
from kvx_tcp.span import Span


@define
class _Permit:
    """Sorted, disjoint ranges [starts, ends) on the line of registered memory."""

    starts: Int64s
    ends: Int64s

    def add(self, starts: Int64s, ends: Int64s) -> None:
        starts, ends = np.concatenate((self.starts, starts)), np.concatenate((self.ends, ends))
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        if len(starts):
            first = np.concatenate(([True], starts[1:] > reach[:-1]))
            last = np.concatenate((first[1:], [True]))
            self.starts, self.ends = starts[first], reach[last]

    def covers(self, starts: Int64s, ends: Int64s) -> bool:
        if not len(starts):
            return True
        if not len(self.starts):
            return False
        at = np.searchsorted(self.starts, starts, "right") - 1
        return bool(((at >= 0) & (ends <= self.ends[at])).all())


class Permits:
    """Permissions by transfer; then by peer name (None: anybody), operation and stamp."""

    def __init__(self) -> None:
        self._transfers: dict[str, dict[tuple[str | None, Op, Stamp], _Permit]] = {}
        self._floors: dict[str, int] = {}

    def permit(self, peer: str | None, op: Op, span: Span, stamp: Stamp) -> None:
        """Adds to what the same peer may already do with the same stamp."""
        empty = np.zeros(0, dtype=np.int64)
        permit = self._transfers.setdefault(stamp.transfer, {}).setdefault((peer, op, stamp), _Permit(empty, empty))
        starts = span.line()
        permit.add(starts, starts + span.pieces.length)

    def forbid(self, transfer: str) -> None:
        self._transfers.pop(transfer, None)

    def fence(self, peer: str, generation: int) -> None:
        """Refuse generations below `generation` from this peer, whatever else permits them."""
        self._floors[peer] = max(generation, self._floors.get(peer, 0))

    def check(self, peer: str, op: Op, stamp: Stamp, span: Span) -> Status:
        """May `peer` do `op` on the whole of `span`?"""
        permits = self._transfers.get(stamp.transfer)
        if permits is None:
            return Status.UNKNOWN
        if stamp.generation < self._floors.get(peer, 0):
            return Status.STALE
        known = [permits[key] for key in ((peer, op, stamp), (None, op, stamp)) if key in permits]
        if known:
            starts = span.line()
            ends = starts + span.pieces.length
            return Status.OK if any(permit.covers(starts, ends) for permit in known) else Status.BOUNDS
        mine = [key for key in permits if key[0] in (peer, None)]
        if not mine:
            return Status.AUTH
        return Status.STALE if any(key[1] is op for key in mine) else Status.BOUNDS
