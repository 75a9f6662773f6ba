"""The one place that knows SGLang's own types: its plugin registry, its KVArgs, its process groups."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from kvx.core.errors import ConfigError
from kvx_sglang.layout import Buffer, Facts, State
from kvx_sglang.preflight import BACKEND


def register_backend() -> None:
    """Make `--disaggregation-transfer-backend kvx` known to this process. May be called again."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        choices.add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in utils.TransferBackend._value2member_map_:
        _add_member(utils.TransferBackend, BACKEND)
        HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _get_kv_class, HookType.AROUND)


def _add_member(kind: Any, value: str) -> None:
    """SGLang looks its backends up in an Enum, which has no door for new members."""
    member = object.__new__(kind)
    member._name_, member._value_, member.__objclass__ = value.upper(), value, kind
    member._sort_order_ = len(kind._member_names_)
    kind._member_names_.append(member._name_)
    kind._member_map_[member._name_] = member
    kind._value2member_map_[value] = member
    type.__setattr__(kind, member._name_, member)


def _get_kv_class(original: Callable[[Any, Any], Any], transfer_backend: Any, class_type: Any) -> Any:
    if getattr(transfer_backend, "value", transfer_backend) != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.utils import KVClassType

    from kvx_sglang import manager, peers

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: manager.KvxManager,
        KVClassType.SENDER: peers.KvxSender,
        KVClassType.RECEIVER: peers.KvxReceiver,
        KVClassType.BOOTSTRAP_SERVER: manager.KvxBootstrapServer,
    }[class_type]


def check_parallel(manager: Any) -> None:
    """Raises ConfigError for ways to run SGLang that this version does not transfer."""
    from sglang.srt.runtime_context import get_device, get_parallel

    device = get_device().device
    if device != "cpu":
        raise ConfigError(f"SGLang runs on {device}: kvx for SGLang moves host memory only")
    for what, size in (
        ("pipeline stages", manager.pp_size),
        ("context parallel ranks", manager.attn_cp_size),
        ("decode context parallel ranks", manager.dcp_size),
        ("data parallel ranks", get_parallel().num_dp_ranks),
    ):
        if size > 1:
            raise ConfigError(f"SGLang runs with {size} {what}: kvx for SGLang transfers from and to TP ranks only")
    if manager.defer_decode_allocation:
        raise ConfigError("the allocation policy prefill_complete is not for kvx: leave it at early")


def hold_s() -> float:
    """How long SGLang holds the pages of a failed request back at most."""
    from sglang.srt.environ import envs

    return float(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get())


def describe_args(args: Any, server_args: Any, *, mla: bool, tp_rank: int, tp_size: int) -> Facts:
    """What SGLang's KVArgs say of one rank."""
    sliced = not mla and not args.is_hybrid_mla_backend and args.kv_layout is None
    states = zip(args.state_types, args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return Facts(
        model=PurePath(server_args.served_model_name or server_args.model_path).name,
        dtype=args.kv_cache_dtype_str,
        page_size=args.page_size,
        kv=_buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
        aux=_buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
        states=tuple(State(kind.value, _buffers(*buffers)) for kind, *buffers in states),
        kv_ids=tuple(args.kv_layer_ids),
        drafts=args.num_draft_entries,
        kv_layout=args.kv_layout,
        total_heads=_total_heads(args, server_args) if sliced else 1,
        sliced=sliced,
        replicated=mla,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def _buffers(bases: Iterable[int], lengths: Iterable[int], items: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(Buffer(*buffer) for buffer in zip(bases, lengths, items, strict=True))


def _total_heads(args: Any, server_args: Any) -> int:
    """The model's KV heads. SGLang tells them to the prefill side only."""
    told: int | None = getattr(args, "total_kv_head_num", None)
    if told is not None:
        return told
    from sglang.srt.configs.model_config import ModelConfig

    return int(ModelConfig.from_server_args(server_args).get_total_num_kv_heads())


def agree_on_epoch(tp_size: int) -> int:
    """63 random bits that all ranks of this start share; drawn by the first one, so a restart changes them."""
    epoch = secrets.randbits(63)
    if tp_size == 1:
        return epoch
    import torch
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().attn_tp_group
    shared = torch.tensor([epoch], dtype=torch.int64)
    torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
    return int(shared.item())


def integers(items: Any) -> list[int]:
    """Indices as SGLang has them: arrays of any integer type, lists, lists of 0-d arrays; None is none."""
    if items is None:
        return []
    if isinstance(items, np.ndarray):
        flat: list[int] = items.ravel().tolist()
        return flat
    return [int(item) for part in items for item in np.asarray(part).ravel()]


def components(states: Sequence[Any] | None, count: int) -> list[list[int]]:
    """The items of each state component; SGLang may leave one out, or all."""
    return [integers(items) for items in states] if states is not None else [[] for _ in range(count)]
