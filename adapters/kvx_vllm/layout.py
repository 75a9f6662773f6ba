"""vLLM's KV cache tensors as kvx's Regions and Layout.

Known is what vLLM 0.32 allocates for attention on CPUs: `[blocks, kv_heads, block_size, width]`,
a block contiguous, all layers views into few storages. With full attention a head is 2 * head_size
wide, and inside of it the backend packs keys and values as its instruction set likes, so a block is
never cut between tokens, and backend and instruction set are part of the layout's `variant`. With
multi-head latent attention (MLA, as DeepSeek) the one head is the latent, which every rank holds
whole. Anything else is refused with a sentence: moving bytes that were misread would be worse than
not starting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from attrs import frozen

from kvx.core.errors import ConfigError
from kvx.core.model import CacheGroup, LayerSpec, Layout, Packing, Region

FULL_ATTENTION = "full_attention"
LATENT_ATTENTION = "latent_attention"
SLIDING_WINDOW = "sliding_window"


@frozen
class CacheTensor:
    """One layer's tensor: addresses and bytes of its storage, shape and strides in elements."""

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: str


@frozen
class GroupFacts:
    """One KV cache group as vLLM describes it."""

    kind: str
    layers: tuple[str, ...]
    block_size: int
    heads: int

    @property
    def replicated(self) -> bool:
        """Whether all ranks hold the same bytes."""
        return self.kind == LATENT_ATTENTION


@frozen
class ModelFacts:
    """What the tensors do not tell. `model` and `variant` are compared as texts by both sides."""

    model: str
    variant: str
    total_heads: int
    num_blocks: int
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


def describe(
    tensors: Mapping[str, CacheTensor], groups: Sequence[GroupFacts], facts: ModelFacts
) -> tuple[Layout, tuple[Region, ...]]:
    """Layout and regions of one rank. Raises ConfigError for a cache that this version does not understand."""
    named = [layer for group in groups for layer in group.layers]
    if missing := sorted(set(named) - set(tensors)):
        raise ConfigError(f"vLLM has registered no KV cache for {_some(missing)}: this model cannot be transferred")
    if extra := sorted(set(tensors) - set(named)):
        raise ConfigError(f"{_some(extra)} belong to no KV cache group: this model cannot be transferred")
    storages = {(tensor.storage, tensor.storage_bytes, tensor.device) for tensor in tensors.values()}
    regions = tuple(Region(index, *storage) for index, storage in enumerate(sorted(storages)))
    index_of = {region.base: region.index for region in regions}
    cache_groups = tuple(
        CacheGroup(
            index,
            group.kind,
            group.block_size,
            tuple(_layer(name, tensors[name], group, facts, index_of) for name in group.layers),
            group.heads,
            group.heads if group.replicated else facts.total_heads,
            Packing.HEADS,
            group.replicated,
        )
        for index, group in enumerate(groups)
    )
    layout = Layout(
        model=facts.model,
        dtype=_one("types of elements", {tensor.dtype for tensor in tensors.values()}),
        variant=facts.variant,
        groups=cache_groups,
        num_blocks=facts.num_blocks,
        tp_rank=facts.tp_rank,
        tp_size=facts.tp_size,
        dp_rank=facts.dp_rank,
        dp_size=facts.dp_size,
    )
    return layout, regions


def _layer(
    name: str, tensor: CacheTensor, group: GroupFacts, facts: ModelFacts, index_of: Mapping[int, int]
) -> LayerSpec:
    if group.kind not in (FULL_ATTENTION, LATENT_ATTENTION, SLIDING_WINDOW):
        raise ConfigError(
            f"layer {name} has a KV cache of kind {group.kind}: "
            "kvx for vLLM moves full, sliding-window and multi-head latent attention only"
        )
    if tensor.device != "cpu":
        raise ConfigError(f"layer {name} has its KV cache on {tensor.device}: this version moves host memory only")
    wanted = (facts.num_blocks, group.heads, group.block_size)
    if len(tensor.shape) != 4 or tensor.shape[:3] != wanted:
        raise ConfigError(f"layer {name} has a KV cache of shape {list(tensor.shape)}, expected {[*wanted, 'width']}")
    # Of one head the stride means nothing.
    inner = [(size, stride) for size, stride in zip(tensor.shape[1:], tensor.strides[1:], strict=True) if size > 1]
    if inner[-1][1] != 1 or any(outer[1] != below[0] * below[1] for outer, below in pairwise(inner)):
        raise ConfigError(f"layer {name}: blocks of its KV cache are not contiguous (strides {list(tensor.strides)})")
    block_bytes = group.heads * group.block_size * tensor.shape[3] * tensor.itemsize
    stride = tensor.strides[0] * tensor.itemsize
    if stride < block_bytes:
        raise ConfigError(f"layer {name}: blocks of its KV cache overlap (strides {list(tensor.strides)})")
    if tensor.offset + (facts.num_blocks - 1) * stride + block_bytes > tensor.storage_bytes:
        raise ConfigError(f"layer {name}: its KV cache ends behind its storage")
    return LayerSpec(name, index_of[tensor.storage], tensor.offset, block_bytes, stride)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _one(what: str, values: set[str]) -> str:
    if len(values) != 1:
        raise ConfigError(f"the KV cache mixes {what}: {', '.join(sorted(values))}")
    return values.pop()
