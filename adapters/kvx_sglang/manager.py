"""SGLang's manager of transfers on one rank, and the place where prefill ranks say how they are reached."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvx.address import parse_address
from kvx.core.errors import ConfigError
from kvx.instance import open_instance
from kvx_sglang import compat
from kvx_sglang.layout import Pools, describe
from kvx_sglang.preflight import HOLD, HOLD_S, load_options
from kvx_sglang.rooms import Change, DecodeRooms, Ended, Forgotten, PrefillRooms, Ready

logger = logging.getLogger("sglang.srt.disaggregation.kvx")


class KvxManager(CommonKVManager):  # type: ignore[misc]
    """The kvx instance of this rank and its rooms. SGLang's scheduler calls it on its own thread and never waits.

    What SGLang's base class keeps beside it stays in use: statuses, failure texts, the heartbeat to prefill servers.
    Its message sockets do not: how to reach a prefill rank's kvx stands where SGLang registers its socket.
    """

    supports_deferred_decode_kv_release = True
    """Pages of a failed request stay out of the pool until kvx says that nobody can write into them."""
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.options = load_options()
        self._registers = False
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        compat.check_parallel(self)
        rank, size = self.attn_tp_rank, self.attn_tp_size
        facts = compat.describe_args(args, server_args, mla=bool(is_mla_backend), tp_rank=rank, tp_size=size)
        self.pools: Pools = describe(facts)
        epoch = compat.agree_on_epoch(size)
        self.kvx = open_instance(self.options, self.pools.layout, self.pools.regions, epoch=epoch)
        self.rooms: PrefillRooms | DecodeRooms
        self.lost: set[int] = set()
        """Decode: rooms whose prefill side was not there any more."""
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self.rooms = PrefillRooms(self.kvx.put, self.pools, time.monotonic, self.options.patience_s)
            self._registers = True
            self.register_to_bootstrap()
        else:
            if not self.enable_deferred_decode_kv_release:
                raise ConfigError(
                    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off: "
                    "pages of aborted requests would be reused while they are still written"
                )
            if (hold_s := compat.hold_s()) < HOLD_S:
                logger.warning("kvx: pages that may still be written are reused after %g s: set %s", hold_s, HOLD)
            self.rooms = DecodeRooms(self.kvx.put, self.pools, epoch, self.options.lease_s)
            self._start_heartbeat_checker_thread()
        logger.info("kvx: %s of %s listens on %s", disaggregation_mode.value, self.kvx.info.peer, self.kvx.info.address)

    # -------------------------------------------------- meeting

    def register_to_bootstrap(self) -> None:
        if self._registers:  # SGLang's constructor calls before there is anything to register
            super().register_to_bootstrap()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        host, port = parse_address(self.kvx.info.address)
        super()._register_topology_row(url, {**payload, "rank_ip": host, "rank_port": port})

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """A prefill server that SGLang cannot serve fails its requests, not this server."""
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except (RuntimeError, AssertionError) as refusal:
            logger.error("kvx: prefill server %s does not fit: %s", bootstrap_addr, refusal)
            return False

    # -------------------------------------------------- news

    def pump(self) -> None:
        """Take kvx's news; never blocks."""
        self.apply(self.rooms.take(self.kvx.news()))

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Ready():
                    self.req_to_decode_prefix_len[change.room] = change.prefix_pages * self.pools.page_size
                    self.update_status(change.room, KVPoll.WaitingForInput)
                case Ended(ok=True):
                    self.update_status(change.room, KVPoll.Success)
                case Ended():
                    self._failed(change)
                case Forgotten():
                    self.request_status.pop(change.room, None)
                    with self.failure_lock:
                        self.failure_records.pop(change.room, None)

    def _failed(self, change: Ended) -> None:
        if change.room not in self.request_status:
            return
        if change.lost:
            self.lost.add(change.room)
        with self.failure_lock:  # the first cause counts
            self.failure_records.setdefault(change.room, change.detail)
        self.update_status(change.room, KVPoll.Failed)

    # -------------------------------------------------- prefill

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        assert isinstance(self.rooms, PrefillRooms)
        states = compat.components(state_indices, len(self.pools.states))
        pages = compat.integers(kv_indices)
        self.apply(
            self.rooms.stage(bootstrap_room, index_slice.start, pages, last=is_last_chunk, row=aux_index, states=states)
        )

    # -------------------------------------------------- decode

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """SGLang counts acknowledgements here; kvx has told already, per transfer."""
        assert isinstance(self.rooms, DecodeRooms)
        self.pump()
        return self.rooms.safe(bootstrap_room)


class KvxBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Tells decode servers where the prefill ranks are, and nothing that SGLang's decode side would compare: a
    difference ends its whole server, while kvx's handshake refuses one request after the other.
    """

    page_size = property(lambda self: None, lambda self, value: None)
    kv_cache_dtype = property(lambda self: None, lambda self, value: None)
    kv_layout = property(lambda self: None, lambda self, value: None)
