from __future__ import annotations

from typing import Any

import pytest

from kvx.core.errors import ConfigError, LayoutMismatch
from kvx.core.layout import check
from kvx.core.model import Packing
from kvx_sglang.layout import Buffer, Facts, Pools, State, describe


def buffers(count: int, item: int, items: int, base: int = 4096) -> tuple[Buffer, ...]:
    return tuple(Buffer(base + index * (1 << 20), item * items, item) for index in range(count))


def pools(**changes: Any) -> Pools:
    facts: dict[str, Any] = {
        "model": "m", "dtype": "float32", "page_size": 16, "kv": buffers(4, 4096, 32),
        "aux": buffers(3, 64, 8, 1 << 30), "total_heads": 4,
    }  # fmt: skip
    return describe(Facts(**facts | changes))


STATES = (State("mamba", buffers(2, 48, 8, 1 << 31)), State("swa", buffers(1, 96, 20, 1 << 32)))


def test_each_buffer_is_a_region_keys_and_values_first() -> None:
    layout, regions = (one := pools(states=STATES)).layout, one.regions
    assert [group.kind for group in layout.groups] == ["kv", "aux", "state mamba", "state swa"]
    assert [layer.name for layer in layout.groups[0].layers] == ["kv.0.0", "kv.1.0", "kv.2.0", "kv.3.0"]
    assert [layer.region for group in layout.groups for layer in group.layers] == list(range(10))
    assert [region.base for region in regions[:4]] == [buffer.base for buffer in buffers(4, 4096, 32)]
    assert one.capacities == (32, 8, 8, 20)
    assert layout.num_blocks == 32
    check(layout, layout)


def test_layers_pair_up_by_number_where_sglang_tells_it() -> None:
    names = [layer.name for layer in pools(kv_ids=(3, 7, 3, 7)).layout.groups[0].layers]
    assert names == ["kv.3.0", "kv.7.0", "kv.3.1", "kv.7.1"]


def test_heads_of_a_rank() -> None:
    group = pools(tp_rank=1, tp_size=2).layout.groups[0]
    assert (group.heads, group.total_heads, group.packing) == (2, 4, Packing.TOKENS_HEADS)
    assert pools(tp_rank=1, tp_size=8).layout.groups[0].heads == 1


def test_mla_is_on_every_rank_and_other_odd_pages_on_one() -> None:
    assert pools(sliced=False, replicated=True, tp_size=2).layout.groups[0].replicated
    group = pools(sliced=False, tp_size=2).layout.groups[0]
    assert (group.packing, group.heads, group.total_heads) == (Packing.WHOLE, 1, 2)


def test_a_draft_model_s_pages_are_the_prompt_s_pages_and_never_cut() -> None:
    one = pools(drafts=2)
    assert [group.kind for group in one.layout.groups] == ["kv", "draft", "aux"]
    first, blocks = one.blocks(64, 1, [5, 6, 7], [2], [])
    assert (first, blocks.groups) == ((1, 1, 63), ((5, 6, 7), (5, 6, 7), (2,)))
    with pytest.raises(LayoutMismatch, match="total_heads"):
        check(one.layout, pools(drafts=2, tp_size=2, kv=buffers(4, 2048, 32)).layout)


def test_items_stand_at_the_prompt_s_end() -> None:
    first, blocks = pools(states=STATES).blocks(64, 0, [4, 5, 6, 7], [3], [[1], [9, 8, 7]])
    assert first == (0, 63, 63, 61)
    assert blocks.groups == ((4, 5, 6, 7), (3,), (1,), (9, 8, 7))
    assert pools(states=STATES).counts(blocks) == (1, 1, 3)


@pytest.mark.parametrize(
    ("pages", "rows", "states", "says"),
    [
        ([32], [3], [[1], []], "kv: items 32..32 of a buffer of 32"),
        ([-1], [3], [[1], []], "kv: items -1..-1"),
        ([4], [8], [[1], []], "aux: items 8..8 of a buffer of 8"),
        ([4], [3], [[8], []], "state mamba: items 8..8"),
        ([4], [3], [[1], range(17)], "state swa: 17 items for 16 tokens"),
        ([4], [3], [[1]], "1 state components, 2 are registered"),
    ],
)
def test_items_that_are_not_there(pages: list[int], rows: list[int], states: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pools(states=STATES).blocks(16, 0, pages, rows, states)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"page_size": 32}, "page size 16"),
        ({"kv_layout": "rows"}, "KV layout"),
        ({"model": "other"}, "model"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"total_heads": 8}, "total_heads"),
        ({"kv": buffers(6, 4096, 32)}, "layers"),
        ({"kv": buffers(4, 8192, 32)}, "kv.0.0"),
        ({"aux": buffers(4, 64, 8)}, "layers"),
        ({"aux": buffers(3, 128, 8)}, "aux.0"),
        ({"states": STATES}, "groups"),
        ({"sliced": False, "replicated": True}, "groups"),
    ],
)
def test_what_differs_is_refused_by_name(change: dict[str, Any], fact: str) -> None:
    with pytest.raises(LayoutMismatch, match=fact):
        check(pools().layout, pools(**change).layout)


def test_pools_of_other_sizes_fit() -> None:
    check(pools().layout, pools(kv=buffers(4, 4096, 1000)).layout)


def test_an_optional_buffer_that_is_not_in_use_is_left_out() -> None:
    empty = (*buffers(2, 64, 8), Buffer(1 << 30, 0, 0))
    assert [layer.name for layer in pools(aux=empty).layout.groups[1].layers] == ["aux.0", "aux.1"]
    with pytest.raises(LayoutMismatch, match="layers"):
        check(pools(aux=empty).layout, pools().layout)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv": ()}, "describes 0 KV buffers"),
        ({"kv_ids": (1, 2)}, "2 layers"),
        ({"drafts": 4}, "4 of a draft"),
        ({"aux": ()}, "no buffer for aux"),
        ({"kv": (Buffer(4096, 10, 20),)}, "10 bytes with items of 20"),
    ],
)
def test_buffers_that_make_no_sense(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pools(**change)
