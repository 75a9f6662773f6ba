"""kvx's numbers in vLLM's own metrics: on /metrics, and in the line that vLLM logs at intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvx.core.model import Mode, Role
from kvx_vllm.tally import merged, summary

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LEVELS = {
    "open": ("vllm:kvx_open_transfers", "Transfers that are not over on this instance."),
    "held": ("vllm:kvx_held_blocks", "Blocks that transfers keep out of the pool."),
    "quarantined": ("vllm:kvx_quarantined_blocks", "Held blocks of transfers that failed and may still be written."),
}


class KvxStats(KVConnectorStats):  # type: ignore[misc]
    """`Tally.take`'s data on its way through vLLM."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KvxStats:
        if other.data:
            self.data = merged(self.data, other.data) if self.data else other.data
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvxMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registered once in the process that serves /metrics; labels are vLLM's own and the ones named here."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        own = list(labelnames)
        counter, histogram, gauge = metric_types[Counter], metric_types[Histogram], metric_types[Gauge]
        self._transfers = counter(
            name="vllm:kvx_transfers",
            documentation="Transfers that have ended, by outcome: ok, or the reason of the failure.",
            labelnames=[*own, "mode", "role", "outcome"],
        )
        self._bytes = counter(
            name="vllm:kvx_bytes",
            documentation="Bytes of KV cache in transfers that ended ok.",
            labelnames=[*own, "mode", "role"],
        )
        self._seconds = histogram(
            name="vllm:kvx_transfer_seconds",
            documentation="From the request's arrival at kvx to the end of its transfer, where that was ok.",
            labelnames=[*own, "mode", "role"],
            buckets=list(_SECONDS),
        )
        self._refused = counter(
            name="vllm:kvx_refused",
            documentation="Requests whose transfer was refused before it began.",
            labelnames=[*own, "reason"],
        )
        self._levels = {
            key: gauge(name=name, documentation=text, labelnames=own, multiprocess_mode="mostrecent")
            for key, (name, text) in _LEVELS.items()
        }
        for values in per_engine_labelvalues.values():
            for level in self._levels.values():
                level.labels(*values).set(0)
            for mode in Mode:
                for role in Role:
                    self._transfers.labels(*values, mode.value, role.value, "ok")
                    self._bytes.labels(*values, mode.value, role.value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if not transfer_stats_data:
            return
        engine = self.per_engine_labelvalues[engine_idx]
        for mode, role, outcome, moved, seconds in transfer_stats_data["ended"]:
            self._transfers.labels(*engine, mode, role, outcome).inc()
            if outcome == "ok":
                self._bytes.labels(*engine, mode, role).inc(moved)
                self._seconds.labels(*engine, mode, role).observe(seconds)
        for reason in transfer_stats_data["refused"]:
            self._refused.labels(*engine, reason).inc()
        for key, level in self._levels.items():
            level.labels(*engine).set(transfer_stats_data[key])
