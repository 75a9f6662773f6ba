"""Pieces of memory read as one string of bytes, and a cursor that walks it in system calls."""

from __future__ import annotations

import numpy as np

from kvx.core.model import Descriptors
from kvx.memory import Int64s, Memory

VIEWS = 1000
"""Views per batch: IOV_MAX is 1024, and a header goes before them."""


class Span:
    """The bytes of a table of pieces, in order. Pieces of no bytes must have been removed."""

    def __init__(self, memory: Memory, pieces: Descriptors) -> None:
        """Raises TransportError if a piece is not registered memory."""
        self.slot = memory.locate(pieces)
        self.pieces = pieces
        self._memory = memory
        self._ends: Int64s = np.cumsum(pieces.length)
        self.nbytes = int(self._ends[-1]) if len(pieces) else 0

    def line(self) -> Int64s:
        return self._memory.line(self.slot, self.pieces.offset)

    def views(self, start: int, length: int) -> list[memoryview]:
        """Views of the bytes from `start` on: `length` bytes, fewer where that takes over VIEWS pieces."""
        first = int(self._ends.searchsorted(start, "right"))
        last = min(int(self._ends.searchsorted(start + length, "left")) + 1, first + VIEWS)
        batch = slice(first, last)
        views = self._memory.cut(
            self.slot[batch].tolist(), self.pieces.offset[batch].tolist(), self.pieces.length[batch].tolist()
        )
        before = int(self._ends[first - 1]) if first else 0
        views[0] = views[0][start - before :]
        beyond = int(self._ends[last - 1]) - (start + length)
        if beyond > 0:
            views[-1] = views[-1][:-beyond]
        return views


class Cursor:
    """What is left of one frame's payload: in memory, or in a filler once the memory is out of bounds."""

    def __init__(self, span: Span | None, start: int, length: int, filler: memoryview | None = None) -> None:
        self.span = span
        self.remaining = length
        self._position = start
        self._filler = filler
        self._views: list[memoryview] = []
        self.viewed = 0
        """Bytes in the present `views()`."""

    @classmethod
    def void(cls, length: int, filler: memoryview) -> Cursor:
        """A payload that touches no registered memory."""
        return cls(None, 0, length, filler)

    def divert(self, filler: memoryview) -> None:
        """From the next system call on use `filler` in place of the span."""
        self.span = None
        self._filler = filler
        self._views = []
        self.viewed = 0

    def views(self) -> list[memoryview]:
        """What one system call can move of it; never empty while something remains."""
        if not self.viewed:
            if self.span is not None:
                self._views = self.span.views(self._position, self.remaining)
            elif self._filler is not None:
                self._views = [self._filler[: self.remaining]]
            self.viewed = sum(map(len, self._views))
        return self._views

    def advance(self, count: int) -> None:
        """`count` bytes of `views()` have been moved."""
        self.remaining -= count
        self._position += count
        self.viewed -= count
        views, used = self._views, 0
        while used < len(views) and count >= len(views[used]):
            count -= len(views[used])
            used += 1
        del views[:used]
        if count:
            views[0] = views[0][count:]


def coalesce(local: Descriptors, remote: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Join neighbours that are contiguous on both sides and drop empty pieces; lengths must be equal."""
    keep = local.length > 0
    a = Descriptors(local.region[keep], local.offset[keep], local.length[keep])
    b = Descriptors(remote.region[keep], remote.offset[keep], remote.length[keep])
    if len(a) < 2:
        return a, b
    joined = (a.region[1:] == a.region[:-1]) & (a.offset[1:] == a.offset[:-1] + a.length[:-1])
    joined &= (b.region[1:] == b.region[:-1]) & (b.offset[1:] == b.offset[:-1] + b.length[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    length = np.add.reduceat(a.length, first)
    return (
        Descriptors(a.region[first], a.offset[first], length),
        Descriptors(b.region[first], b.offset[first], length),
    )
