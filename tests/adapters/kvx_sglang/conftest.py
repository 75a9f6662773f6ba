"""SGLang's managers, senders and receivers in this process, driven by hand: no engine, no model.

Imported without SGLang too, by the tests of what does not need it.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvx.cluster import free_ports

PAGE, LAYERS, PAGES, HEADS, ROWS = 16, 3, 32, 4, 8
QUICK = {
    "lease_s": 6,
    "lost_s": 1.5,
    "keepalive_s": 0.5,
    "grace_s": 2,
    "drain_limit_s": 1,
    "handshake_s": 2,
    "ack_wait_s": 3,
    "op_timeout_s": 3,
    "quarantine_s": 0.2,
    "patience_s": 8,
    "part_gap_s": 4,
}
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


class Buffers:
    """The memory of one rank: an MHA pool (K of every layer, then V), rows of metadata, state components."""

    def __init__(
        self, seed: int, *, page: int = PAGE, layers: int = 2 * LAYERS, heads: int = HEADS, aux: int = 3,
        states: Sequence[tuple[str, Sequence[int]]] = (), pages: int = PAGES, head_bytes: int = 16,
    ) -> None:  # fmt: skip
        dice = np.random.default_rng(seed)

        def some(count: int, size: int) -> NDArray[np.uint8]:
            return dice.integers(1, 255, (count, size), dtype=np.uint8)

        self.page, self.heads, self.head_bytes = page, heads, head_bytes
        self.kv = [some(pages, page * heads * head_bytes) for _ in range(layers)]
        self.aux = [some(ROWS, 64) for _ in range(aux)]
        self.states = [(kind, [some(ROWS, size) for size in sizes]) for kind, sizes in states]

    def tokens(self, layer: int, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Bytes of one buffer as [token][head][byte]."""
        return self.kv[layer][list(pages)].reshape(-1, self.heads, self.head_bytes)

    def copy(self) -> list[NDArray[np.uint8]]:
        return [buffer.copy() for buffer in [*self.kv, *self.aux, *(b for _, group in self.states for b in group)]]

    def args(self, rank: int, total_heads: int, dtype: str) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs, StateType

        args: Any = KVArgs()
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = _infos(self.kv)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = _infos(self.aux)
        groups = [_infos(group) for _, group in self.states]
        args.state_types = [StateType(kind) for kind, _ in self.states]
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = ([g[i] for g in groups] for i in range(3))
        nothing: list[list[int]] = [[] for _ in groups]
        args.state_dim_per_tensor = args.state_slice_outer_counts = args.state_layer_ids = nothing
        args.state_conv_shard_groups = nothing
        args.kv_layer_ids, args.kv_cache_dtype_str, args.kv_layout = [], dtype, None
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id, args.prefill_start_layer = rank, 0, 0, 0, 0
        args.prefill_end_layer, args.mla_compression_ratios, args.swa_kv_cache_layout = LAYERS, None, None
        args.page_size, args.kv_head_num, args.total_kv_head_num = self.page, self.heads, total_heads
        args.is_hybrid_mla_backend, args.ib_device, args.rust_http_port = False, None, None
        return args


def _infos(buffers: Sequence[NDArray[np.uint8]]) -> tuple[list[int], list[int], list[int]]:
    return ([b.ctypes.data for b in buffers], [b.nbytes for b in buffers], [b[0].nbytes for b in buffers])


def until(what: str, condition: Callable[[], object], limit: float = 40.0) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.002)
    raise AssertionError(f"timed out: {what}")


class Rig:
    """Makes managers of both roles that meet at one bootstrap server."""

    buffers = Buffers
    until = staticmethod(until)

    def __init__(self, folder: Path, context: Context) -> None:
        self.folder, self._context = folder, context
        self.address = context.address
        self._managers: list[Any] = []

    def prefill(self, buffers: Buffers, **options: Any) -> Any:
        return self.manager("prefill", buffers, **options)

    def decode(self, buffers: Buffers, **options: Any) -> Any:
        manager = self.manager("decode", buffers, **options)
        until("the bootstrap server knows all ranks", lambda: manager.try_ensure_parallel_info(self.address))
        return manager

    def manager(
        self, role: str, buffers: Buffers, *, port: int | None = None, tp: tuple[int, int] = (0, 1), mla: bool = False,
        total_heads: int = HEADS, dtype: str = "float32", epoch: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        from kvx_sglang import compat
        from kvx_sglang.manager import KvxManager

        rank, size = tp
        port = port or free_ports(1)[0]
        text = _toml({"listen": f"127.0.0.1:{port}", "instance": f"{role}-{port}", **QUICK, **options})
        config = self.folder / f"{role}-{port}-{rank}.toml"
        config.write_text(text)
        assert tomllib.loads(text)
        with pytest.MonkeyPatch.context() as patch, self._context.ranks(rank, size):
            patch.setenv("KVX_CONFIG", str(config))
            if epoch is not None:
                patch.setattr(compat, "agree_on_epoch", lambda _: epoch)
            args = buffers.args(rank, total_heads, dtype)
            manager: Any = KvxManager(args, self._context.modes[role], self._context.server_args, mla)
        manager.port = port
        self._managers.append(manager)
        return manager

    def sender(self, manager: Any, room: int) -> Any:
        from kvx_sglang.peers import KvxSender

        return KvxSender(manager, self.address, room)

    def receiver(self, manager: Any, room: int) -> Any:
        from kvx_sglang.peers import KvxReceiver

        receiver: Any = KvxReceiver(manager, self.address, room)
        receiver.init(0)
        return receiver

    def stop(self, manager: Any) -> None:
        """As when its server is stopped."""
        self._managers.remove(manager)
        _close(manager)

    def close(self) -> None:
        for manager in self._managers:
            _close(manager)


def _close(manager: Any) -> None:
    manager.kvx.close()
    if hasattr(manager, "_heartbeat_shutdown"):
        manager._heartbeat_shutdown.set()
    manager._zmq_ctx.destroy(linger=0)


def _toml(options: dict[str, Any]) -> str:
    plain = [f"{name} = {_value(value)}" for name, value in options.items() if not isinstance(value, dict)]
    tables = [(name, value) for name, value in options.items() if isinstance(value, dict)]
    for name, table in tables:
        plain += [f'["{name}"]', *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(plain) + "\n"


def _value(value: Any) -> str:
    return json.dumps(value)


class Context:
    """SGLang's runtime context, one per process, and a bootstrap server."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import get_context, get_parallel

        from kvx_sglang.manager import KvxBootstrapServer

        serving, bootstrap = free_ports(2)
        self.server_args = (
            get_context()
            .override_server_args(
                host="127.0.0.1",
                port=serving,
                disaggregation_bootstrap_port=bootstrap,
                device="cpu",
                model_path="/m/tiny",
            )
            .install()
        )
        self._parallel = get_parallel()
        self._parallel.override_permanently(
            tp_rank=0,
            attn_tp_rank=0,
            attn_cp_rank=0,
            attn_dp_rank=0,
            attn_dcp_rank=0,
            pp_rank=0,
            dp_rank=None,
            pp_group=None,
        )
        self.modes = {"prefill": DisaggregationMode.PREFILL, "decode": DisaggregationMode.DECODE}
        self.bootstrap_class: Any = KvxBootstrapServer
        self.port, self.address = bootstrap, f"127.0.0.1:{bootstrap}"
        self.boot: Any = None

    def ranks(self, rank: int, size: int) -> Any:
        sizes = {"tp_size": size, "attn_tp_size": size, "moe_tp_size": size}
        return self._parallel.override(tp_rank=rank, attn_tp_rank=rank, moe_tp_rank=rank, **sizes)

    def start(self) -> None:
        self.boot = self.bootstrap_class("127.0.0.1", self.port)
        from sglang.srt.utils.network import is_port_available

        until("the bootstrap server listens", lambda: not is_port_available(self.port))


@pytest.fixture(scope="session")
def context() -> Context:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Context()


@pytest.fixture
def rig(context: Context, tmp_path: Path) -> Iterator[Rig]:
    context.start()
    rig = Rig(tmp_path, context)
    yield rig
    rig.close()
    context.boot.close()
