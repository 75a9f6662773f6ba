from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from kvx.core.errors import ConfigError
from kvx.core.layout import Pair, pairs
from kvx.core.model import Layout, Packing, Region
from kvx_vllm.layout import CacheTensor, GroupFacts, ModelFacts, describe

BLOCKS, HEADS, SIZE, WIDTH = 10, 4, 32, 64
BLOCK_BYTES = HEADS * SIZE * WIDTH * 4
FACTS = ModelFacts("Llama/1", "vllm CPU_ATTN vec AVX2 auto", HEADS, BLOCKS)
GROUP = GroupFacts("full_attention", ("a", "b"), SIZE, HEADS)


def tensor(index: int) -> CacheTensor:
    return CacheTensor(
        storage=4096,
        storage_bytes=2 * BLOCKS * BLOCK_BYTES,
        offset=index * BLOCKS * BLOCK_BYTES,
        shape=(BLOCKS, HEADS, SIZE, WIDTH),
        strides=(HEADS * SIZE * WIDTH, SIZE * WIDTH, WIDTH, 1),
        itemsize=4,
        dtype="float32",
        device="cpu",
    )


TENSORS = {"a": tensor(0), "b": tensor(1)}


def test_all_layers_are_views_into_one_region() -> None:
    layout, regions = describe(TENSORS, [GROUP], FACTS)
    assert regions == (Region(0, 4096, 2 * BLOCKS * BLOCK_BYTES, "cpu"),)
    (group,) = layout.groups
    assert [(layer.name, layer.region, layer.offset, layer.block_bytes, layer.stride) for layer in group.layers] == [
        ("a", 0, 0, BLOCK_BYTES, BLOCK_BYTES),
        ("b", 0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES),
    ]
    assert group.packing is Packing.HEADS
    assert (layout.dtype, layout.num_blocks, layout.rank) == ("float32", BLOCKS, 0)


def test_storages_of_their_own_become_regions_by_address() -> None:
    tensors = {"a": evolve(tensor(0), storage=9000), "b": evolve(tensor(0), storage=500)}
    layout, regions = describe(tensors, [GROUP], FACTS)
    assert [region.base for region in regions] == [500, 9000]
    assert [layer.region for layer in layout.groups[0].layers] == [1, 0]


def test_another_instruction_set_is_another_fingerprint() -> None:
    one, _ = describe(TENSORS, [GROUP], FACTS)
    other, _ = describe(TENSORS, [GROUP], evolve(FACTS, variant="vllm CPU_ATTN amx AVX512 auto"))
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"device": "cuda:0"}, "on cuda:0"),
        ({"shape": (2, BLOCKS, HEADS, SIZE, WIDTH)}, "shape"),
        ({"shape": (BLOCKS, SIZE, HEADS, WIDTH)}, "shape"),
        ({"shape": (BLOCKS + 1, HEADS, SIZE, WIDTH)}, "shape"),
        ({"strides": (HEADS * SIZE * WIDTH, WIDTH, HEADS * WIDTH, 1)}, "not contiguous"),
        ({"strides": (HEADS * SIZE * WIDTH, SIZE * WIDTH, WIDTH, 2)}, "not contiguous"),
        ({"strides": (HEADS * SIZE, SIZE * WIDTH, WIDTH, 1)}, "overlap"),
        ({"storage_bytes": BLOCKS * BLOCK_BYTES - 1}, "ends behind its storage"),
        ({"dtype": "bfloat16"}, "mixes types"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        describe({**TENSORS, "a": evolve(tensor(0), **change)}, [GROUP], FACTS)


def test_layers_without_a_cache_and_caches_without_a_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache for b"):
        describe({"a": tensor(0)}, [GROUP], FACTS)
    with pytest.raises(ConfigError, match="c belong to no KV cache group"):
        describe({**TENSORS, "c": tensor(0)}, [GROUP], FACTS)


def test_a_latent_is_whole_on_every_rank_and_one_of_them_sends_it() -> None:
    """As vLLM has it on a CPU: one head, whose stride is that of a token."""
    size, width = 16, 576
    strides = (size * width, width, width, 1)
    latent = evolve(tensor(0), shape=(BLOCKS, 1, size, width), strides=strides)
    group = GroupFacts("latent_attention", ("a",), size, 1)

    def rank(number: int, ranks: int) -> Layout:
        layout, _ = describe({"a": latent}, [group], evolve(FACTS, tp_rank=number, tp_size=ranks))
        return layout

    (described,) = rank(0, 2).groups
    assert (described.replicated, described.heads, described.total_heads) == (True, 1, 1)
    assert described.layers[0].block_bytes == size * width * 4
    assert pairs(rank(0, 2), rank(0, 1)) == (Pair(0, 0, empty=False), Pair(1, 0, empty=True))
    assert pairs(rank(0, 1), rank(0, 2)) == (Pair(0, 0, empty=False), Pair(0, 1, empty=False))


def test_other_kinds_of_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="MambaSpec"):
        describe(TENSORS, [evolve(GROUP, kind="MambaSpec")], FACTS)
