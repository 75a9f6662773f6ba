"""The reference engine's cache in kvx's words: one region, one group, one LayerSpec per layer."""

from __future__ import annotations

import hashlib
import json

from kvx.core.model import CacheGroup, LayerSpec, Layout, Packing, Region
from kvx_reference.engine.cache import KvCache
from kvx_reference.engine.config import ModelConfig


def layer_name(layer: int) -> str:
    return f"layers.{layer}"


def describe(config: ModelConfig, cache: KvCache) -> tuple[Layout, Region]:
    """The array is `[layer][block][token][head][key, value]`, so inside of a block tokens come before heads."""
    array = cache.array
    layer_bytes, block_bytes = array.strides[:2]
    layers = tuple(
        LayerSpec(layer_name(layer), 0, layer * layer_bytes, block_bytes, block_bytes) for layer in range(config.layers)
    )
    heads = config.kv_heads
    group = CacheGroup(0, "full_attention", cache.block_size, layers, heads, heads, Packing.TOKENS_HEADS)
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode()).hexdigest()[:16]
    layout = Layout(f"LlamaForCausalLM/{digest}", str(array.dtype), "reference", (group,), cache.blocks)
    return layout, Region(0, array.ctypes.data, array.nbytes)
