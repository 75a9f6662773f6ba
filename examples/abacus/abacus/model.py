"""A toy language model in 32-bit whole numbers: each next token depends on every cached value before it, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, VOCABULARY = 4, 32, 4096
BLOCK = 8
"""Tokens per block of the cache."""
Numbers = NDArray[np.uint32]


class Model:
    """Weights drawn from a seed, and the cache `[layer][block][token][number]`."""

    def __init__(self, seed: int, blocks: int) -> None:
        draw = np.random.default_rng(seed)
        self._embedding = draw.integers(0, 1 << 32, (VOCABULARY, WIDTH), dtype=np.uint32)
        self._weights = draw.integers(0, 1 << 32, (LAYERS, 2, WIDTH), dtype=np.uint32) | np.uint32(1)
        self.seed = seed
        self.cache: Numbers = np.zeros((LAYERS, blocks, BLOCK, WIDTH), dtype=np.uint32)

    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> int:
        """Cache these tokens, of positions from `start` on, and return the one that follows them."""
        following = 0
        for position, token in enumerate(tokens, start):
            x = self._embedding[token]
            for layer, (into, out) in enumerate(self._weights):
                self.cache[layer, blocks[position // BLOCK], position % BLOCK] = x * into
                seen = self.cache[layer, blocks[: position // BLOCK + 1]].reshape(-1, WIDTH)[: position + 1]
                steps = np.arange(1, position + 2, dtype=np.uint32)[:, None]
                x = (x ^ (seen * (steps | np.uint32(1))).sum(axis=0, dtype=np.uint32)) * out
                x ^= x >> np.uint32(15)
            following = int(x.sum(dtype=np.uint32)) % VOCABULARY
        return following
