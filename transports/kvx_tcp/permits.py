"""What this rank permits to its peers: a pure table that answers one question per operation."""

from __future__ import annotations

from kvx.core.model import Op, Stamp
from kvx.memory import Ranges
from kvx_tcp.frames import Status
from kvx_tcp.span import Span


class Permits:
    """Permissions by transfer; then by peer name (None: anybody), operation and stamp."""

    def __init__(self) -> None:
        self._transfers: dict[str, dict[tuple[str | None, Op, Stamp], Ranges]] = {}
        self._floors: dict[str, int] = {}

    def permit(self, peer: str | None, op: Op, span: Span, stamp: Stamp) -> None:
        """Adds to what the same peer may already do with the same stamp."""
        permit = self._transfers.setdefault(stamp.transfer, {}).setdefault((peer, op, stamp), Ranges())
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
            return Status.OK if any(permit.cover(starts, ends) for permit in known) else Status.BOUNDS
        mine = [key for key in permits if key[0] in (peer, None)]
        if not mine:
            return Status.AUTH
        return Status.STALE if any(key[1] is op for key in mine) else Status.BOUNDS
