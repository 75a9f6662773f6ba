"""What this adapter needs of vLLM, beyond what its own sources say. See `kvx.drift`."""

from __future__ import annotations

from pathlib import Path

from kvx.drift import Adapter
from kvx_vllm.versions import TESTED

HERE = Path(__file__).parent
_CACHES = "vllm.v1.kv_cache_interface"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"

VLLM = Adapter(
    engine="vllm",
    package="vllm",
    tested=TESTED,
    sources=HERE,
    records=HERE / "interfaces",
    handed_in={
        "vllm.config.vllm.VllmConfig": (
            *("cache_config", "compilation_config", "kv_transfer_config", "model_config", "parallel_config"),
        ),
        "vllm.config.cache.CacheConfig": ("cache_dtype",),
        "vllm.config.compilation.CompilationConfig": ("static_forward_context",),
        "vllm.config.kv_transfer.KVTransferConfig": (
            *("kv_connector", "kv_connector_extra_config", "kv_connector_module_path", "kv_load_failure_policy"),
            "kv_role",
        ),
        "vllm.config.model.ModelConfig": ("hf_config", "get_total_num_kv_heads()"),
        "vllm.config.parallel.ParallelConfig": (
            *("data_parallel_index", "data_parallel_master_port", "data_parallel_size"),
            *("decode_context_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"),
            "tensor_parallel_size",
        ),
        "vllm.distributed.parallel_state.GroupCoordinator": ("cpu_group", "rank_in_group", "ranks", "world_size"),
        "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase": ("get_attn_backend()",),
        "vllm.plugins.DEFAULT_PLUGINS_GROUP": ("'vllm.general_plugins'",),
        "vllm.v1.attention.backend.AttentionBackend": ("get_name()",),
        "vllm.v1.core.block_pool.BlockPool": (
            *("blocks", "num_gpu_blocks", "free_blocks(blocks)", "get_num_free_blocks()", "touch(blocks)"),
        ),
        "vllm.v1.core.kv_cache_manager.KVCacheBlocks": ("get_block_ids()",),
        "vllm.v1.core.sched.output.CachedRequestData": ("num_computed_tokens", "req_ids"),
        "vllm.v1.core.sched.output.KVConnectorBlockState": ("get_block_ids(request)",),
        "vllm.v1.core.sched.output.NewRequestData": ("num_computed_tokens", "req_id"),
        "vllm.v1.core.sched.output.SchedulerOutput": (
            *("kv_connector_block_state", "num_scheduled_tokens", "preempted_req_ids"),
            *("scheduled_cached_reqs", "scheduled_new_reqs"),
        ),
        f"{_CACHES}.FullAttentionSpec": ("attention_chunk_size", "block_size", "num_heads", "sliding_window"),
        f"{_CACHES}.KVCacheConfig": ("kv_cache_groups", "num_blocks"),
        f"{_CACHES}.KVCacheGroupSpec": ("enable_kv_transfer", "host_resident", "kv_cache_spec", "layer_names"),
        "vllm.v1.outputs.KVConnectorOutput": ("failed_recving", "finished_recving", "kv_connector_worker_meta"),
        "vllm.v1.request.Request": (
            *("all_token_ids", "kv_transfer_params", "lora_request", "mm_features", "num_computed_tokens"),
            *("num_prompt_tokens", "prompt_embeds", "prompt_token_ids", "request_id", "status"),
        ),
    },
    spared={
        f"{_BASE}.get_loaded_kv_cache_group_ids": "asked since 0.32; before, a load counted for every group",
    },
)
