"""What this adapter needs of SGLang, beyond what its own sources say. See `kvx.drift`."""

from __future__ import annotations

from pathlib import Path

from kvx.drift import Adapter
from kvx_sglang.versions import TESTED

HERE = Path(__file__).parent

SGLANG = Adapter(
    engine="sglang",
    package="sglang",
    tested=TESTED,
    sources=HERE,
    records=HERE / "interfaces",
    handed_in={
        "sglang.srt.arg_groups.fields.disagg.Disagg": (
            *("disaggregation_bootstrap_port", "disaggregation_decode_retraction_backup", "disaggregation_mode"),
            "disaggregation_transfer_backend",
        ),
        "sglang.srt.arg_groups.fields.model.Model": ("model_path",),
        "sglang.srt.arg_groups.fields.serving.Serving": ("served_model_name",),
        "sglang.srt.configs.model_config.ModelConfig": ("get_total_num_kv_heads()",),
        "sglang.srt.disaggregation.base.conn.KVArgs": (
            *("aux_data_lens", "aux_data_ptrs", "aux_item_lens", "is_hybrid_mla_backend", "kv_cache_dtype_str"),
            *("kv_data_lens", "kv_data_ptrs", "kv_item_lens", "kv_layer_ids", "kv_layout", "num_draft_entries"),
            *("page_size", "state_data_lens", "state_data_ptrs", "state_item_lens", "state_types"),
            "total_kv_head_num",
        ),
        "sglang.srt.disaggregation.base.conn.StateType": (),
        "sglang.srt.disaggregation.common.conn.CommonKVManager": (
            *("attn_cp_size", "connection_lock", "dcp_size", "defer_decode_allocation", "failure_records", "pp_size"),
            *("prefill_info_table", "request_status", "record_failure(room, reason)", "update_status(room, status)"),
        ),
        "sglang.srt.disaggregation.utils.get_kv_class": ("get_kv_class(transfer_backend, class_type)",),
        "sglang.srt.distributed.parallel_state.GroupCoordinator": ("cpu_group", "ranks"),
        "sglang.srt.plugins.GENERAL_PLUGINS_GROUP": ("'sglang.srt.plugins'",),
        "sglang.srt.plugins.load_plugins": (),
    },
    spared={},
)
