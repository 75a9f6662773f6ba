"""A paged KV cache for benches: `[layer][block][byte]` in one array, with bytes that tell their place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvx.core.model import CacheGroup, LayerSpec, Layout, Packing, Region

Cache = NDArray[np.uint8]
BLOCK_TOKENS = 16


def new_cache(layers: int, blocks: int, block_bytes: int) -> Cache:
    """A cache of zeros. Raises ValueError for a number below one."""
    if min(layers, blocks, block_bytes) < 1:
        raise ValueError("layers, blocks and block_bytes are at least 1")
    return np.zeros((layers, blocks, block_bytes), dtype=np.uint8)


def layer_name(layer: int) -> str:
    return f"layers.{layer}"


def describe(cache: Cache) -> tuple[Layout, Region]:
    """One region and one group, a LayerSpec per layer; `BLOCK_TOKENS` tokens in a block."""
    layers, blocks, block_bytes = cache.shape
    specs = tuple(
        LayerSpec(layer_name(layer), 0, layer * cache.strides[0], block_bytes, block_bytes) for layer in range(layers)
    )
    group = CacheGroup(0, "full", BLOCK_TOKENS, specs, heads=1, total_heads=1, packing=Packing.WHOLE)
    return Layout("bench", "bytes", "bench", (group,), blocks), Region(0, cache.ctypes.data, cache.nbytes)


def pattern(layer: int, count: int, block_bytes: int, sample: int) -> Cache:
    """What `count` blocks of one layer hold, `[block][byte]`; another one in each layer and sample."""
    nbytes = count * block_bytes
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64((sample << 40) + (layer << 32))
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:nbytes].reshape(count, block_bytes)
