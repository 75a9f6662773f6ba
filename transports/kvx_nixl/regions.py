"""Registered memory by region index, of this rank or of a peer: bounds, and absolute addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvx.core.errors import TransportError
from kvx.core.model import Descriptors, Region

Table = NDArray[np.uint64]
"""Rows of address, length, device: what NIXL takes."""
MAX_REGIONS = 65536
_MAX_ADDRESS = 1 << 63


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One region as it travels to a peer."""

    index: int
    base: int
    length: int
    device: str


class Regions:
    """Raises TransportError for a device that NIXL has no kind for, an index given twice, an impossible address."""

    def __init__(self, places: Sequence[Place]) -> None:
        places = sorted(places, key=lambda place: place.index)
        for place in places:
            end = place.base + place.length
            if place.index < 0 or place.length < 0 or not (0 < place.base <= end < _MAX_ADDRESS or not place.length):
                raise TransportError(f"region {place.index} has no valid address")
        self.places = places
        kinds = [kind(place.device) for place in places]
        self._index = np.array([place.index for place in places], dtype=np.int64)
        self._length = np.array([place.length for place in places], dtype=np.int64)
        self._base = np.array([place.base for place in places], dtype=np.uint64)
        self._number = np.array([number for _, number in kinds], dtype=np.uint64)
        self._vram = np.array([name == "VRAM" for name, _ in kinds], dtype=bool)
        if len(np.unique(self._index)) != len(places):
            raise TransportError("a region index is given twice")

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Regions:
        return cls([Place(region.index, region.base, region.length, region.device) for region in regions])

    def rows(self) -> Iterator[tuple[str, list[tuple[int, int, int, str]]]]:
        """What NIXL registers, by kind of memory."""
        for name in ("DRAM", "VRAM"):
            found = [
                (place.base, place.length, kind(place.device)[1], "")
                for place in self.places
                if place.length and kind(place.device)[0] == name
            ]
            if found:
                yield name, found

    def locate(self, pieces: Descriptors) -> tuple[Table, NDArray[np.bool_]]:
        """Absolute pieces, and which of them are VRAM. Raises TransportError if any byte is not registered."""
        region, offset, length = pieces.region, pieces.offset, pieces.length
        if not len(region) == len(offset) == len(length):
            raise TransportError("region, offset and length differ in number")
        if len(region) and not len(self._index):
            raise TransportError("no memory is registered")
        slot = np.minimum(np.searchsorted(self._index, region), max(0, len(self._index) - 1))
        room = self._length[slot]
        inside = (self._index[slot] == region) & (length >= 0) & (length <= room)
        inside &= (offset >= 0) & (offset <= room - np.where(inside, length, 0))
        if not inside.all():
            at = int(np.argmin(inside))
            raise TransportError(
                f"piece {at} (region {region[at]}, offset {offset[at]}, length {length[at]}) is not registered memory"
            )
        table = np.empty((len(region), 3), dtype=np.uint64)
        table[:, 0] = self._base[slot] + offset.astype(np.uint64)
        table[:, 1] = length
        table[:, 2] = self._number[slot]
        return table, self._vram[slot]


def kind(device: str) -> tuple[str, int]:
    """NIXL's kind of memory and number of the device: "cpu", "cuda:N". Raises TransportError."""
    name, _, number = device.partition(":")
    if name == "cpu" and not number:
        return "DRAM", 0
    if name == "cuda" and number.isascii() and number.isdigit() and len(number) < 5:
        return "VRAM", int(number)
    raise TransportError(f"memory on {device!r} has no kind in NIXL")
