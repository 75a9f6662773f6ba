"""Registered memory: bounds-checked views of the ranges that an engine gave, and of nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvx.core.errors import TransportError
from kvx.core.model import Descriptors, Region

Int64s = NDArray[np.int64]


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
