"""Registered memory: bounds-checked views of the ranges that an engine gave, and of nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvx.core.errors import TransportError
from kvx.core.model import Descriptors, Region

Int64s = NDArray[np.int64]


def _none() -> Int64s:
    return np.zeros(0, dtype=np.int64)


@define
class Ranges:
    """Sorted, disjoint ranges [starts, ends) on the line of registered memory: what a target permits, for instance."""

    starts: Int64s = field(factory=_none)
    ends: Int64s = field(factory=_none)

    def add(self, starts: Int64s, ends: Int64s) -> None:
        """Further ranges, in any order; those that touch become one."""
        starts, ends = np.concatenate((self.starts, starts)), np.concatenate((self.ends, ends))
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        if len(starts):
            first = np.concatenate(([True], starts[1:] > reach[:-1]))
            last = np.concatenate((first[1:], [True]))
            self.starts, self.ends = starts[first], reach[last]

    def cover(self, starts: Int64s, ends: Int64s) -> bool:
        """Does each of these lie in one of mine?"""
        if not len(starts):
            return True
        if not len(self.starts):
            return False
        at = np.searchsorted(self.starts, starts, "right") - 1
        return bool(((at >= 0) & (ends <= self.ends[at])).all())


class Memory:
    """Host memory of one rank, by region index. The engine keeps it alive."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """Raises TransportError for device memory, an index given twice, or an impossible address."""
        ordered = sorted(regions, key=lambda region: region.index)
        self._index: Int64s = np.array([region.index for region in ordered], dtype=np.int64)
        self._length: Int64s = np.array([region.length for region in ordered], dtype=np.int64)
        if len(np.unique(self._index)) != len(ordered):
            raise TransportError("a region index is given twice")
        # Regions side by side on one line, a gap after each so that neighbours never merge.
        self._start: Int64s = np.cumsum(self._length + 1) - (self._length + 1)
        self._views = [_view(region) for region in ordered]
        self._base: Int64s = np.array([region.base for region in ordered], dtype=np.int64)

    def locate(self, pieces: Descriptors) -> Int64s:
        """Slot of each piece's region. Raises TransportError if any byte of a piece is not registered."""
        region, offset, length = pieces.region, pieces.offset, pieces.length
        if not len(region) == len(offset) == len(length):
            raise TransportError("region, offset and length differ in number")
        if not len(region):
            return np.zeros(0, dtype=np.int64)
        if not len(self._index):
            raise TransportError("no memory is registered")
        slot = np.minimum(np.searchsorted(self._index, region), len(self._index) - 1)
        room = self._length[slot]
        inside = (self._index[slot] == region) & (length >= 0) & (length <= room)
        inside &= (offset >= 0) & (offset <= room - np.where(inside, length, 0))
        if not inside.all():
            at = int(np.argmin(inside))
            raise TransportError(
                f"piece {at} (region {region[at]}, offset {offset[at]}, length {length[at]}) is not registered memory"
            )
        return slot.astype(np.int64, copy=False)

    def line(self, slot: Int64s, offset: Int64s) -> Int64s:
        """Position of located pieces on one line on which no two regions touch."""
        return self._start[slot] + offset

    def stretches(self, pieces: Descriptors) -> tuple[Int64s, Int64s]:
        """Start and end of each piece on that line. Raises TransportError if any byte is not registered."""
        starts = self.line(self.locate(pieces), pieces.offset)
        return starts, starts + pieces.length

    def addresses(self, pieces: Descriptors) -> Int64s:
        """Virtual address of each piece. Raises TransportError if any byte of a piece is not registered."""
        return self._base[self.locate(pieces)] + pieces.offset

    def cut(self, slots: list[int], offsets: list[int], lengths: list[int]) -> list[memoryview]:
        """Writable views of located pieces."""
        views = self._views
        return [
            views[slot][offset : offset + length] for slot, offset, length in zip(slots, offsets, lengths, strict=True)
        ]

    def view(self, region: int, offset: int, length: int) -> memoryview:
        """Writable view of one range. Raises TransportError outside of registered memory."""
        slot = self.locate(Descriptors.of([(region, offset, length)]))
        return self._views[int(slot[0])][offset : offset + length]


def _view(region: Region) -> memoryview:
    if region.device != "cpu":
        raise TransportError(f"region {region.index} is on {region.device}: only host memory has an address here")
    if region.length < 0 or region.base < 0 or (region.length and not region.base):
        raise TransportError(f"region {region.index} has no valid address")
    if not region.length:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * region.length).from_address(region.base)
    return np.ctypeslib.as_array(array).data
