"""SGLang's transfer buffers as kvx's Regions and Layout.

SGLang tells a transfer backend of flat buffers, each an array of items: pages of the KV cache, one row per
request of metadata ("aux"), slots or rows of state components. Each kind is one cache group here:

| group | blocks | cut between ranks |
|---|---|---|
| kv | pages of the prompt | by heads, `[token][head]`; not at all for MLA, which every rank holds |
| draft, where there is one | the same pages | never |
| aux | the one row of the request | every rank holds it |
| each state component | its items, whatever they are | never |

SGLang does not tell a backend how long a prompt is, both sides know its pages only: the tokens of a transfer
are those of its pages. Items of aux and state have no place in the prompt; they stand at its end, one per
token. Whatever is never cut needs equal TP on both sides, which kvx's planner checks and says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from kvx.core.errors import ConfigError
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Packing, Region

KV = 0


@frozen
class Buffer:
    """One buffer: address, bytes, and bytes of one item of it."""

    base: int
    length: int
    item: int


@frozen
class State:
    """One state component: SGLang's name of its type, and its buffers."""

    kind: str
    buffers: tuple[Buffer, ...]


@frozen
class Facts:
    """What SGLang tells of one rank's buffers. `kv_ids` names the layer of each KV buffer, where it says so.

    `total_heads`: the model's KV heads. `sliced`: a page is `[token][head]`, so ranks of another TP can share it.
    `replicated`: pages that are not sliced are the same on every rank (MLA). The last `drafts` of the KV buffers are
    those of a draft model.
    """

    model: str
    dtype: str
    page_size: int
    kv: tuple[Buffer, ...]
    aux: tuple[Buffer, ...]
    states: tuple[State, ...] = ()
    kv_ids: tuple[int, ...] = ()
    drafts: int = 0
    kv_layout: str | None = None
    total_heads: int = 1
    sliced: bool = True
    replicated: bool = False
    tp_rank: int = 0
    tp_size: int = 1


@frozen
class Pools:
    """One rank's buffers as kvx sees them, and how a request's items become blocks."""

    layout: Layout
    regions: tuple[Region, ...]
    capacities: tuple[int, ...]
    page_size: int
    drafts: bool

    @property
    def states(self) -> tuple[CacheGroup, ...]:
        return self.layout.groups[self._aux + 1 :]

    @property
    def _aux(self) -> int:
        return 2 if self.drafts else 1

    def blocks(
        self, tokens: int, page: int, pages: Sequence[int], rows: Sequence[int], states: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], BlockTable]:
        """First positions and blocks per group of `pages` from page number `page` of the prompt on, and its items.

        Raises ValueError for an item that its buffer does not have, or for components that SGLang has not described.
        """
        if len(states) != len(self.states):
            raise ValueError(f"{len(states)} state components, {len(self.states)} are registered")
        kv: list[Sequence[int]] = [pages] * self._aux
        table = BlockTable.of(*kv, rows, *states)
        for group, capacity, items in zip(self.layout.groups, self.capacities, table.groups, strict=True):
            if items and not 0 <= min(items) <= max(items) < capacity:
                raise ValueError(f"{group.kind}: items {min(items)}..{max(items)} of a buffer of {capacity}")
            if len(items) > tokens:
                raise ValueError(f"{group.kind}: {len(items)} items for {tokens} tokens")
        ends = [tokens - len(items) for items in table.groups[self._aux :]]
        return (*[page] * self._aux, *ends), table

    def counts(self, blocks: BlockTable) -> tuple[int, ...]:
        """How many items of aux and of each state component these are."""
        return tuple(map(len, blocks.groups[self._aux :]))


def describe(facts: Facts) -> Pools:
    """Layout and regions of one rank. Raises ConfigError for buffers that make no sense."""
    ids = facts.kv_ids or tuple(range(len(facts.kv)))
    if len(ids) != len(facts.kv) or not 0 <= facts.drafts < len(facts.kv):
        raise ConfigError(f"SGLang describes {len(facts.kv)} KV buffers, {facts.drafts} of a draft, {len(ids)} layers")
    seen: Counter[int] = Counter()
    names = []
    for layer in ids:  # keys and values of a layer have the same number
        names.append(f"kv.{layer}.{seen[layer]}")
        seen[layer] += 1
    target = len(facts.kv) - facts.drafts
    whole, shared = _Cut(total_heads=facts.tp_size), _Cut(replicated=True)
    uncut = shared if facts.replicated else whole
    heads = max(1, facts.total_heads // facts.tp_size)
    by_heads = _Cut(heads, facts.total_heads, Packing.TOKENS_HEADS)
    shape = _Shape()
    shape.add("kv", facts.page_size, names[:target], facts.kv[:target], by_heads if facts.sliced else uncut)
    if facts.drafts:
        shape.add("draft", facts.page_size, names[target:], facts.kv[target:], uncut)
    shape.add("aux", 1, [f"aux.{index}" for index in range(len(facts.aux))], facts.aux, shared)
    for number, state in enumerate(facts.states):
        layers = [f"state.{number}.{index}" for index in range(len(state.buffers))]
        shape.add(f"state {state.kind}", 1, layers, state.buffers, whole)
    layout = Layout(
        model=facts.model,
        dtype=facts.dtype,
        variant=f"sglang, page size {facts.page_size}, KV layout {facts.kv_layout or 'plain'}",
        groups=tuple(shape.groups),
        num_blocks=max(shape.capacities),
        tp_rank=facts.tp_rank,
        tp_size=facts.tp_size,
    )
    return Pools(layout, tuple(shape.regions), tuple(shape.capacities), facts.page_size, bool(facts.drafts))


@frozen
class _Cut:
    """How the ranks of an instance share what is in a block; as it is: not at all, one rank has it."""

    heads: int = 1
    total_heads: int = 1
    packing: Packing = Packing.WHOLE
    replicated: bool = False


class _Shape:
    """Groups, regions and capacities as they are collected."""

    def __init__(self) -> None:
        self.groups: list[CacheGroup] = []
        self.regions: list[Region] = []
        self.capacities: list[int] = []

    def add(self, kind: str, block_size: int, names: Sequence[str], buffers: Sequence[Buffer], cut: _Cut) -> None:
        layers, counts = [], []
        for name, buffer in zip(names, buffers, strict=True):
            if not 0 <= buffer.item <= buffer.length:
                raise ConfigError(f"SGLang describes {name} as {buffer.length} bytes with items of {buffer.item}")
            if buffer.item:  # an optional buffer that is not in use has items of no bytes
                region = Region(len(self.regions), buffer.base, buffer.length)
                self.regions.append(region)
                layers.append(LayerSpec(name, region.index, 0, buffer.item, buffer.item))
                counts.append(buffer.length // buffer.item)
        if not layers:
            raise ConfigError(f"SGLang describes no buffer for {kind}: this model cannot be transferred")
        shared = cut.heads, cut.total_heads, cut.packing, cut.replicated
        self.groups.append(CacheGroup(len(self.groups), kind, block_size, tuple(layers), *shared))
        self.capacities.append(min(counts))
