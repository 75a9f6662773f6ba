"""Memory for benches: bytes in one piece or many, with a pattern that tells every position and sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvx.core.model import Descriptors, Region

_GAP = 64


class Slab:
    """`nbytes` bytes in `pieces` equal pieces: contiguous if one, else shuffled by `seed` with gaps between."""

    def __init__(self, nbytes: int, pieces: int, seed: int) -> None:
        """Raises ValueError where the pieces would not be equal."""
        if pieces < 1 or nbytes < 1 or nbytes % pieces:
            raise ValueError(f"{nbytes} bytes cannot be cut into {pieces} equal pieces")
        self.nbytes = nbytes
        self.pieces = pieces
        self._size = nbytes // pieces
        gap = _GAP if pieces > 1 else 0
        self._rows: NDArray[np.uint8] = np.zeros((pieces, self._size + gap), dtype=np.uint8)
        self._order = np.random.default_rng(seed).permutation(pieces)
        self.fill(0)

    @property
    def region(self) -> Region:
        return Region(0, self._rows.ctypes.data, self._rows.nbytes)

    @property
    def descriptors(self) -> Descriptors:
        offset = self._order.astype(np.int64) * self._rows.shape[1]
        return Descriptors(np.zeros_like(offset), offset, np.full_like(offset, self._size))

    @property
    def views(self) -> list[memoryview]:
        """The pieces in order."""
        return [self._rows[row].data[: self._size] for row in self._order]

    def fill(self, sample: int) -> None:
        self._rows[self._order, : self._size] = self._pattern(sample)

    def matches(self, sample: int) -> bool:
        """Is this sample's pattern in its place, and every gap untouched?"""
        same = np.array_equal(self._rows[self._order, : self._size], self._pattern(sample))
        return same and not self._rows[:, self._size :].any()

    def _pattern(self, sample: int) -> NDArray[np.uint8]:
        nbytes = len(self._order) * self._size
        words = np.arange(nbytes // 8 + 1, dtype=np.uint64) + np.uint64(sample << 40)
        words *= np.uint64(0x9E3779B97F4A7C15)
        return words.view(np.uint8)[:nbytes].reshape(len(self._order), self._size)
