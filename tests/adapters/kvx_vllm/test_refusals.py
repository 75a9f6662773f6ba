"""What kvx for vLLM does not transfer, asked with vLLM's own configurations: refused with a sentence, before any byte.

Each message is recorded: the matrix (`make test-matrix`) shows it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from attrs import frozen

from kvx.config import Options
from kvx.core.errors import ConfigError, LayoutMismatch
from kvx.core.layout import check
from kvx.core.model import Layout
from kvx_vllm.layout import CacheTensor, GroupFacts, ModelFacts, describe

# What vLLM's own imports warn of is not kvx's.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

BLOCKS, HEADS, BLOCK, HEAD = 8, 4, 32, 32
LAYERS = ("layer.0", "layer.1")
DRAFT = ("draft.0",)
OTHERS: dict[str, dict[str, Any]] = {
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 128},
    "RSWASpec": {"rswa_window": 128},
}
"""Kinds of vLLM's groups, and what each asks for beside the fields of all."""

Record = Callable[[str, object], None]


@frozen
class Layer:
    """What is asked of a layer of vLLM's."""

    sliding_window: int | None

    def get_attn_backend(self) -> Any:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run((sys.executable, "-m", "kvx_vllm.tiny_model", str(folder)), check=True, timeout=200)
    return str(folder)


def configured(model: str, **arguments: Any) -> Any:
    """vLLM's configuration of a server that was started with these arguments, and with kvx."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    options = {"listen": "127.0.0.1:5700", "allow_untested_engine": True}
    transfer = KVTransferConfig(kv_connector="KvxConnector", kv_role="kv_both", kv_connector_extra_config=options)
    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": BLOCK, **arguments}
    return EngineArgs(model=model, kv_transfer_config=transfer, **given).create_engine_config()


def attention(kind: str, **more: Any) -> Any:
    """A KV cache group of vLLM, by the name of its class."""
    import torch
    from vllm.v1 import kv_cache_interface

    fields: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.float32}
    spec = getattr(kv_cache_interface, kind)(**{**fields, **more})
    return kv_cache_interface.KVCacheGroupSpec(list(LAYERS), spec)


def mamba() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    return KVCacheGroupSpec(list(LAYERS), MambaSpec(BLOCK, shapes=((16, 3), (4, 16)), dtypes=(torch.float32,) * 2))


def caches(dtype: str = "float32", block: int = BLOCK, names: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    """What vLLM registers for full attention on a CPU."""
    import torch

    return {name: torch.zeros((BLOCKS, HEADS, block, 2 * HEAD), dtype=getattr(torch, dtype)) for name in names}


def described(groups: list[Any], tensors: dict[str, Any] | None = None, variant: str = "vllm") -> Layout:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvx_vllm import compat

    config = KVCacheConfig(BLOCKS, [], groups)
    facts = ModelFacts("Llama/1", variant, HEADS, BLOCKS)
    layout, _ = describe(compat.cache_tensors(tensors or caches()), compat.group_facts(config), facts)
    return layout


def test_full_attention_is_what_these_tests_would_accept() -> None:
    """The groups and caches here are refused for what is different in each test, and for nothing else."""
    layout = described([attention("FullAttentionSpec")])
    check(layout, layout)
    assert [layer.name for layer in layout.groups[0].layers] == list(LAYERS)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_group_of_another_kind(kind: str, record_property: Record) -> None:
    with pytest.raises(ConfigError, match="moves full, sliding-window and") as refusal:
        described([attention(kind, **OTHERS[kind])])
    assert kind in str(refusal.value)
    record_property("refusal", refusal.value)


def mixed() -> list[Any]:
    """As Gemma has them: full attention and a sliding window."""
    full, window = attention("FullAttentionSpec"), attention("SlidingWindowSpec", sliding_window=128)
    full.layer_names, window.layer_names = ["layer.0"], ["layer.1"]
    return [full, window]


def test_the_hybrid_manager_on_one_side(record_property: Record) -> None:
    """Without it vLLM keeps all tokens of a layer with a window, and all layers in one group."""
    with_manager, without = described(mixed()), described([attention("FullAttentionSpec", sliding_window=128)])
    check(with_manager, with_manager)
    check(without, without)
    with pytest.raises(LayoutMismatch, match="groups differs") as refusal:
        check(with_manager, without)
    record_property("refusal", refusal.value)


def test_another_window_on_one_side(model: str, record_property: Record) -> None:
    """The same weights, and one server told of another window: the bytes would fit, and mean something else."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvx_vllm import compat

    config, groups = configured(model), mixed()
    context = config.compilation_config.static_forward_context

    def variant(window: int) -> str:
        for name, looks_back in (("layer.0", None), ("layer.1", window)):
            context[name] = Layer(looks_back)
        return compat._variant(config, KVCacheConfig(BLOCKS, [], groups))

    mine, other = (described(groups, variant=variant(window)) for window in (128, 256))
    check(mine, mine)
    with pytest.raises(LayoutMismatch, match=r"variant differs.*window 128\+none.*window 256\+none") as refusal:
        check(mine, other)
    record_property("refusal", refusal.value)


def test_state_of_mamba(record_property: Record) -> None:
    with pytest.raises(ConfigError, match="MambaSpec") as refusal:
        described([mamba()])
    record_property("refusal", refusal.value)


def test_the_state_of_mamba_as_vllm_registers_it(record_property: Record) -> None:
    """A list of tensors for each layer."""
    with pytest.raises(ConfigError, match="of list: it cannot be transferred") as refusal:
        described([mamba()], {name: [one, one] for name, one in caches().items()})
    record_property("refusal", refusal.value)


def test_a_cache_on_a_device(record_property: Record) -> None:
    shape = (BLOCKS, HEADS, BLOCK, 2 * HEAD)
    strides = (HEADS * BLOCK * 2 * HEAD, BLOCK * 2 * HEAD, 2 * HEAD, 1)
    on_gpu = CacheTensor(4096, BLOCKS * strides[0] * 4, 0, shape, strides, 4, "float32", "cuda:0")
    group = GroupFacts("full_attention", ("layer.0",), BLOCK, HEADS)
    with pytest.raises(ConfigError, match="moves host memory only") as refusal:
        describe({"layer.0": on_gpu}, [group], ModelFacts("Llama/1", "vllm", HEADS, BLOCKS))
    record_property("refusal", refusal.value)


def test_a_cache_of_eight_bits_on_one_side(record_property: Record) -> None:
    group = attention("FullAttentionSpec")
    whole, small = described([group]), described([group], caches("float8_e4m3fn"))
    with pytest.raises(LayoutMismatch, match="dtype differs") as refusal:
        check(whole, small)
    record_property("refusal", refusal.value)


@pytest.mark.parametrize("block", [16, 64])
def test_another_block_size(block: int, record_property: Record) -> None:
    """On a CPU a block is never cut between tokens, so a multiple cannot be mapped either."""
    mine = described([attention("FullAttentionSpec")])
    other = described([attention("FullAttentionSpec", block_size=block)], caches(block=block))
    with pytest.raises(LayoutMismatch, match="block_size") as refusal:
        check(mine, other)
    record_property("refusal", refusal.value)


def test_draft_layers_on_one_side(record_property: Record) -> None:
    """Speculative decoding with a draft model at D only: its cache would have to come from somewhere."""
    plain, with_draft = attention("FullAttentionSpec"), attention("FullAttentionSpec")
    with_draft.layer_names += DRAFT
    prefill, decode = described([plain]), described([with_draft], caches(names=LAYERS + DRAFT))
    with pytest.raises(LayoutMismatch, match="layers differs") as refusal:
        check(prefill, decode)
    record_property("refusal", refusal.value)


# ------------------------------------------------------------------ ways of running in parallel


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kvx says before it ends a worker. vLLM sets its log up more than once, so no handler would stay."""
    from kvx_vllm.connector import logger

    lines: list[str] = []
    monkeypatch.setattr(logger, "critical", lambda text, *given: lines.append(text % given))
    return lines


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"]
)
def test_a_worker_of_a_server_with_pipeline_or_context_ranks_ends_with_a_sentence(
    model: str, said: list[str], name: str, record_property: Record
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvx_vllm.connector import KvxConnector

    config = configured(model, distributed_executor_backend="mp")
    setattr(config.parallel_config, name, 2)  # vLLM refuses some of these on a CPU, which is not what is asked
    made = KvxConnector(config, KVConnectorRole.WORKER, KVCacheConfig(BLOCKS, [], [attention("FullAttentionSpec")]))
    with pytest.raises(SystemExit) as end:
        made.register_kv_caches(caches())
    assert end.value.code == 2
    assert f"kvx cannot start: vLLM runs with {name} 2" in said[-1]
    record_property("refusal", said[-1])


def test_data_parallel_ranks_are_instances_of_their_own(model: str) -> None:
    from kvx_vllm import compat

    options = Options.load({"listen": "127.0.0.1:5700"}, env={})
    alone = configured(model)
    assert compat.data_parallel(alone) == (1, 0)
    assert compat.own_options(options, alone) == options
    second = configured(model, data_parallel_size=2, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert compat.data_parallel(second) == (2, 0)
    second.parallel_config.data_parallel_index = 1
    assert compat.data_parallel(second) == (2, 1)
    second.parallel_config.reconfigure_for_independent_dp_rank()  # as the engine core of a dense model does it
    assert compat.data_parallel(second) == (2, 1)
    own = compat.own_options(options, second)
    second.parallel_config.data_parallel_index = 0
    assert compat.data_parallel(second) == (2, 0)
    assert (own.listen, own.advertise, own.instance) == ("127.0.0.1:5702", "127.0.0.1:5702", "127.0.0.1:5700-dp1")
