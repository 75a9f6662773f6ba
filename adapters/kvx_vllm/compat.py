"""The one place that knows vLLM's own types, and in which versions they look like this."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.request import RequestStatus

from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx_vllm.layout import (
    FULL_ATTENTION,
    LATENT_ATTENTION,
    SLIDING_WINDOW,
    CacheTensor,
    GroupFacts,
    ModelFacts,
)
from kvx_vllm.records import Group, Scheduled, Traits

# vLLM names sequences of one request 0_ID, 1_ID, and the prompts of one completion cmpl-ID-0-SUFFIX, cmpl-ID-1-SUFFIX.
_CHILD = re.compile(r"(\d+)_")
_BATCHED = re.compile(r"(?:\d+_)?cmpl-.*-(\d+)-[0-9a-f]{8}$")
_KINDS = {
    "FullAttentionSpec": FULL_ATTENTION,
    "MLAAttentionSpec": LATENT_ATTENTION,
    "SlidingWindowSpec": SLIDING_WINDOW,
}
_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def cache_tensors(kv_caches: Mapping[str, Any]) -> dict[str, CacheTensor]:
    """What `register_kv_caches` was given. Raises ConfigError where a layer's cache is not one tensor."""
    tensors = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"layer {name} has a KV cache of {type(tensor).__name__}: it cannot be transferred")
        storage = tensor.untyped_storage()
        tensors[name] = CacheTensor(
            storage=storage.data_ptr(),
            storage_bytes=storage.nbytes(),
            offset=tensor.storage_offset() * tensor.element_size(),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            itemsize=tensor.element_size(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
        )
    return tensors


def group_facts(kv_cache_config: Any) -> list[GroupFacts]:
    """vLLM's KV cache groups. Raises ConfigError for groups that are not plain caches of attention heads."""
    facts = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kind = _kind(spec) or type(spec).__name__
        if not group.enable_kv_transfer or group.host_resident:
            raise ConfigError(f"vLLM keeps caches of kind {kind} out of transfers: kvx does not support this model")
        heads = getattr(spec, "num_heads", 0)
        facts.append(GroupFacts(kind, tuple(group.layer_names), spec.block_size, heads))
    return facts


def _kind(spec: Any) -> str | None:
    """Which kind of cache this is, where it has nothing beyond that kind.

    Without its hybrid manager vLLM keeps all tokens of a layer with a window: that is full attention for kvx.
    """
    beyond = getattr(spec, "attention_chunk_size", None) or getattr(spec, "extra_retained_tokens", 0)
    return None if beyond else _KINDS.get(type(spec).__name__)


def groups(kv_cache_config: Any) -> list[Group]:
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = int(spec.sliding_window) if _kind(spec) == SLIDING_WINDOW else None
        found.append(Group(int(spec.block_size), window))
    return found


def model_facts(vllm_config: Any, kv_cache_config: Any) -> ModelFacts:
    """Raises ConfigError for ways of running in parallel that this version does not support."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"vLLM runs with {name} {getattr(parallel, name)}: kvx for vLLM supports 1 only")
    dp_size, dp_rank = data_parallel(vllm_config)
    return ModelFacts(
        model=_model(vllm_config.model_config),
        variant=_variant(vllm_config, kv_cache_config),
        total_heads=vllm_config.model_config.get_total_num_kv_heads(),
        num_blocks=kv_cache_config.num_blocks,
        tp_rank=get_tp_group().rank_in_group,
        tp_size=parallel.tensor_parallel_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )


def data_parallel(vllm_config: Any) -> tuple[int, int]:
    """(size, rank). Ranks of a dense model are independent engines for vLLM, and so they are for kvx.

    Each of these is told that it is alone, and what is left are its index and the port at which all would have met: the
    size is then the least that it can be.
    """
    parallel = vllm_config.parallel_config
    rank = int(parallel.data_parallel_index)
    least = 2 if parallel.data_parallel_master_port else 1
    return max(int(parallel.data_parallel_size), rank + 1, least), rank


def own_options(options: Options, vllm_config: Any) -> Options:
    """Those of this engine core: of several behind one address each is an instance, at the ports behind the last."""
    _, rank = data_parallel(vllm_config)
    if rank == 0:
        return options
    shifted = options.at_rank(rank * vllm_config.parallel_config.tensor_parallel_size)
    return evolve(shifted, instance=f"{options.instance}-dp{rank}")


def _model(model_config: Any) -> str:
    """Architecture and a digest of its configuration.

    Paths and names of folders differ between machines; the window that vLLM really uses is named by `_variant`.
    """
    config = {
        key: value
        for key, value in model_config.hf_config.to_dict().items()
        if key not in ("_name_or_path", "transformers_version", "sliding_window")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    names = config.get("architectures") or [str(config.get("model_type"))]
    return f"{names[0]}/{digest}"


def _variant(vllm_config: Any, kv_cache_config: Any) -> str:
    """Attention backends, the cache's type, and on CPUs the instruction set that packs keys and values; windows."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [layer for group in kv_cache_config.kv_cache_groups for layer in group.layer_names]
    backends = {context[name].get_attn_backend().get_name() for name in layers}
    isas = {str(getattr(context[name], "isa", "")) for name in layers}
    capability = torch.backends.cpu.get_cpu_capability()
    cache_dtype = vllm_config.cache_config.cache_dtype
    windows = {getattr(context[name], "sliding_window", None) for name in layers}
    shown = "+".join(sorted(str(window or "none") for window in windows))
    text = f"vllm {'+'.join(sorted(backends))} {'+'.join(sorted(isas))} {capability} {cache_dtype}"
    return f"{text} window {shown}" if any(windows) else text


def agree_on_epoch() -> int:
    """63 random bits that all workers of this engine share; drawn by the first one, so a restart changes them."""
    group = get_tp_group()
    epoch = torch.tensor([secrets.randbits(63)], dtype=torch.int64)
    if group.world_size > 1:
        torch.distributed.broadcast(epoch, src=group.ranks[0], group=group.cpu_group)
    return int(epoch.item())


def traits(request: Any) -> Traits:
    """Of which kind a request is: the keys under which vLLM's prefix cache tells requests apart, and its siblings."""
    obstacle = None
    if request.lora_request is not None:
        obstacle = "kvx for vLLM does not transfer requests with a LoRA adapter: their blocks hold its weights' values"
    elif request.mm_features:
        obstacle = "kvx for vLLM does not transfer multimodal requests: equal tokens may stand for other inputs"
    elif request.prompt_token_ids is None or request.prompt_embeds is not None:
        obstacle = "kvx for vLLM does not transfer prompts that are embeddings"
    name = request.request_id
    child = _CHILD.match(name)
    batched = _BATCHED.match(name)
    first = (child is None or child[1] == "0") and (batched is None or batched[1] == "0")
    return Traits(obstacle, child is not None, first)


def completed(request: Any) -> bool:
    """Whether the request ended as it was asked to, and not by an abort or an error."""
    return request.status in _COMPLETED


def scheduled(output: Any) -> list[Scheduled]:
    """The requests of a step, from vLLM's SchedulerOutput."""
    state = output.kv_connector_block_state
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    steps = []
    for request_id, count in output.num_scheduled_tokens.items():
        blocks = state.get_block_ids(request_id)
        steps.append(Scheduled(request_id, before[request_id], count, blocks or ()))
    return steps


def block_ids(blocks: Any) -> Sequence[Sequence[int]]:
    """The table in vLLM's KVCacheBlocks."""
    table: Sequence[Sequence[int]] = blocks.get_block_ids()
    return table
