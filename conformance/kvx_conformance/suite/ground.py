"""Memory of one rank, and beside it what that memory has to contain: the oracle, which asks no transport.

Every byte of a pattern tells its place and its seed. Canaries stand before, between and after the
regions. Memory that is poisoned is memory that its owner uses for something else by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvx.core.model import Descriptors, Region

Bytes = NDArray[np.uint8]

CANARY = 4096
MIB = 1 << 20
_WINDOWS = MIB
_NOISE_SEED = 0xCA
_SAMPLE = 509
_FEW = 256
"""Up to so many pieces are copied one by one; more are gathered by an index of every byte."""


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that differ from place to place and from seed to seed: windows of one long noise."""
    start = seed * 40_503 % _WINDOWS
    return _noise(-(-nbytes // MIB) * MIB)[start : start + nbytes]


@lru_cache(maxsize=2)
def _noise(nbytes: int) -> Bytes:
    made = np.random.default_rng(_NOISE_SEED).integers(0, 1 << 64, (nbytes + _WINDOWS) // 8, dtype=np.uint64)
    return made.view(np.uint8)


class Ground:
    """The memory of one rank, and `due`, what it has to contain.

    `sizes` are the regions' lengths in bytes, `indexes` their indexes (by default from 0 on). Regions begin
    `shift` bytes after the end of a canary. `buffer` has room for all of it; by default it is made here.
    """

    def __init__(
        self, sizes: Sequence[int], *, indexes: Sequence[int] = (), shift: int = 0, buffer: Bytes | None = None
    ) -> None:
        self._sizes = tuple(sizes)
        self._indexes = tuple(indexes or range(len(sizes)))
        self._starts = tuple(
            CANARY + shift + at * (CANARY + shift) + sum(self._sizes[:at]) for at in range(len(self._sizes))
        )
        self.memory: Bytes = np.zeros(self.room(sizes, shift), dtype=np.uint8) if buffer is None else buffer
        self.due: Bytes = self.memory.copy()

    @staticmethod
    def room(sizes: Sequence[int], shift: int = 0) -> int:
        """Bytes that a buffer needs, a multiple of 8."""
        return -(-(sum(sizes) + (len(sizes) + 1) * (CANARY + shift)) // 8) * 8

    def regions(self, device: str = "cpu") -> list[Region]:
        address = self.memory.ctypes.data
        return [
            Region(index, address + start, size, device)
            for index, start, size in zip(self._indexes, self._starts, self._sizes, strict=True)
        ]

    def whole(self) -> Descriptors:
        """All regions, one piece each."""
        return Descriptors.of((index, 0, size) for index, size in zip(self._indexes, self._sizes, strict=True))

    def fill(self, seed: int) -> None:
        """Give all of it new content, canaries too: from now on this is due."""
        self.due[:] = pattern(len(self.due), seed)
        self.memory[:] = self.due

    def take(self, pieces: Descriptors) -> Bytes:
        """The bytes that are due in these pieces, in order."""
        if len(pieces) <= _FEW:
            return np.concatenate([np.zeros(0, np.uint8), *(self.due[cut] for cut in self._slices(pieces))])
        return self.due[self._places(pieces)]

    def look(self, pieces: Descriptors) -> Bytes:
        """The bytes that stand in a few pieces, in order."""
        return np.concatenate([np.zeros(0, np.uint8), *(self.memory[cut] for cut in self._slices(pieces))])

    def with_bytes(self, pieces: Descriptors, payload: Bytes) -> Bytes:
        """What would be due if these bytes had arrived in these pieces."""
        due, at = self.due.copy(), 0
        if len(pieces) > _FEW:
            due[self._places(pieces)] = payload
            return due
        for cut in self._slices(pieces):
            length = cut.stop - cut.start
            due[cut] = payload[at : at + length]
            at += length
        return due

    def touched(self, pieces: Descriptors) -> bool:
        """Has memory there begun to change? Looks at a part of it only, for it is asked again and again."""
        cuts = [slice(cut.start, cut.stop, _SAMPLE) for cut in self._slices(pieces)]
        return any(bool((self.memory[cut] != self.due[cut]).any()) for cut in cuts)

    def flaw(self, also: Bytes | None = None) -> str:
        """Where a byte is neither what is due nor, if given, what `also` has there; empty where none is."""
        if np.array_equal(self.memory.view(np.uint64), self.due.view(np.uint64)):
            return ""
        wrong = self.memory != self.due
        if also is not None:
            wrong &= self.memory != also
        count = int(np.count_nonzero(wrong))
        if not count:
            return ""
        first = int(np.argmax(wrong))
        last = len(wrong) - 1 - int(np.argmax(wrong[::-1]))
        bytes_are = "one byte is" if count == 1 else f"{count} bytes are"
        until = f" to {self._name(last)}" if last != first else ""
        seen = f"it is {int(self.memory[first]):#04x}, due is {int(self.due[first]):#04x}"
        return f"{bytes_are} wrong, {self._name(first)}{until} ({seen} at the first)"

    def _name(self, place: int) -> str:
        for index, start, size in zip(self._indexes, self._starts, self._sizes, strict=True):
            if start <= place < start + size:
                return f"region {index} offset {place - start}"
        return f"outside of the regions, {self._beside(place)}"

    def _beside(self, place: int) -> str:
        before = [place - start - size + 1 for start, size in zip(self._starts, self._sizes, strict=True)]
        after = [start - place for start in self._starts]
        distances = [(d, f"{d} beyond the end of region {i}") for d, i in zip(before, self._indexes, strict=True)]
        distances += [(d, f"{d} before region {i}") for d, i in zip(after, self._indexes, strict=True)]
        return min(one for one in distances if one[0] > 0)[1]

    def _slices(self, pieces: Descriptors) -> list[slice]:
        start = dict(zip(self._indexes, self._starts, strict=True))
        return [slice(start[r] + offset, start[r] + offset + length) for r, offset, length in pieces.pieces()]

    def _places(self, pieces: Descriptors) -> NDArray[np.int64]:
        order = np.argsort(self._indexes)
        slot = order[np.searchsorted(np.array(self._indexes)[order], pieces.region)]
        begins = np.array(self._starts, dtype=np.int64)[slot] + pieces.offset
        ends = np.cumsum(pieces.length)
        steps = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - pieces.length, pieces.length)
        return np.repeat(begins, pieces.length) + steps
