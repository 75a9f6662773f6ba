"""One request on one rank, as SGLang's scheduler sees it: a prefill rank's sender, a decode rank's receiver."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

from kvx.address import format_address
from kvx_sglang import compat

ABORTED = "Aborted by AbortReq."
"""SGLang's own words for a request that its client took back."""


class KvxSender(CommonKVSender):  # type: ignore[misc]
    """A failure is told when nobody reads the request's pages any more: SGLang frees them at once."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        mgr.apply(mgr.rooms.open(bootstrap_room))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.rooms.plan(self.bootstrap_room, num_kv_indices)

    def poll(self) -> Any:
        self.kv_mgr.pump()
        return super().poll()

    def abort(self) -> None:
        manager = self.kv_mgr
        if self.conclude_state is None and self.bootstrap_room in manager.request_status:
            manager.apply(manager.rooms.abort(self.bootstrap_room, ABORTED))

    def clear(self) -> None:
        super().clear()
        self.kv_mgr.rooms.close(self.bootstrap_room)


class KvxReceiver(CommonKVReceiver):  # type: ignore[misc]
    """SGLang holds a failed request's pages back until `KvxManager.is_abort_release_safe`."""

    _exposed = False

    def _register_kv_args(self) -> bool:
        """kvx's handshake tells what SGLang would register."""
        return self.bootstrap_infos is not None

    def poll(self) -> Any:
        self.kv_mgr.pump()
        return super().poll()

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Open these pages to the prefill side."""
        try:
            self._expose(kv_indices, aux_index, state_indices, decode_prefix_len or 0, destination)
        except ValueError as problem:
            self._fail(f"kvx: {problem}")
        self.init_time = time.time()

    def _expose(self, pages: Any, row: int | None, states: list[Any] | None, prefix: int, destination: Any) -> None:
        manager = self.kv_mgr
        if destination != KVTransferDestination.DEVICE:
            raise ValueError("pages on the host are not supported")
        if not self.bootstrap_infos:
            raise ValueError(f"{self.bootstrap_addr} has named no prefill rank")
        prefix_pages, rest = divmod(prefix, manager.pools.page_size)
        if rest:
            raise ValueError(f"a prefix of {prefix} tokens is not made of whole pages")
        address = self._address()
        if address is None:
            raise ValueError(f"option peers does not let this server go where {self.bootstrap_addr} sends it")
        items = compat.components(states, len(manager.pools.states))
        manager.rooms.expose(self.bootstrap_room, address, prefix_pages, compat.integers(pages), row, items)
        self._exposed = True

    def _address(self) -> str | None:
        """Where kvx of a prefill rank listens; None: this server may not go there."""
        rank = self.bootstrap_infos[0]
        address = format_address(str(rank["rank_ip"]), int(rank["rank_port"]))
        return address if self.kv_mgr.options.may_dial(address) else None

    def _fail(self, detail: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, detail)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        manager = self.kv_mgr
        if self._exposed:
            manager.rooms.abort(self.bootstrap_room, manager.failure_records.get(self.bootstrap_room, ABORTED))
        elif self.bootstrap_infos and (address := self._address()) is not None:
            manager.rooms.leave(self.bootstrap_room, address)

    def failure_exception(self) -> None:
        manager = self.kv_mgr
        if self.bootstrap_room in manager.lost:
            self.invalidate_cached_bootstrap_infos()  # what comes back may be another one
            with manager.connection_lock:
                manager.prefill_info_table.pop(self.bootstrap_addr, None)
        super().failure_exception()

    def _clear(self) -> None:
        self.ensure_abort_notified()  # prefill hears of every end, also of one that is no abort of SGLang's
        self.kv_mgr.rooms.close(self.bootstrap_room, self.kv_mgr.failure_records.get(self.bootstrap_room, ABORTED))
        self.kv_mgr.lost.discard(self.bootstrap_room)
        super()._clear()
