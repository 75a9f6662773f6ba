"""`KvxConnector`: vLLM's connector interface, delegated to the half that belongs to this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvx.config import Options
from kvx.core.errors import ConfigError, KvxError
from kvx.instance import make_ticket, open_instance, read_ticket
from kvx_vllm import compat
from kvx_vllm.layout import describe
from kvx_vllm.metadata import Plan, WorkerReport
from kvx_vllm.pins import PoolPins
from kvx_vllm.records import Identity
from kvx_vllm.scheduler import SchedulerHalf
from kvx_vllm.stats import KvxMetrics, KvxStats
from kvx_vllm.versions import check_version
from kvx_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch

# vLLM configures handlers for loggers below "vllm" only.
logger = logging.getLogger("vllm.kvx")

T = TypeVar("T")


@dataclass
class KvxMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step."""

    plan: Plan


@dataclass
class KvxWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, each step that has news."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvxWorkerMetadata:
        return KvxWorkerMetadata(self.report.merged(other.report))


@dataclass
class KvxHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once, when the KV caches are registered."""

    epoch: int
    fingerprint: str


class KvxConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One in the scheduler, one in each worker. vLLM constructs the workers' first."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config
        self._options = _or_exit(lambda: compat.own_options(Options.load(given), vllm_config))
        _or_exit(lambda: check_version(self._options.allow_untested_engine))
        self._handshake: KvxHandshake | None = None
        self._worker_half: WorkerHalf | None = None
        self._scheduler_half: SchedulerHalf | None = None
        self._pool: Any = None

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise RuntimeError("vLLM used the connector before register_kv_caches")
        return self._worker_half

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise RuntimeError("vLLM used the connector before set_xfer_handshake_metadata")
        return self._scheduler_half

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        def start() -> WorkerHalf:
            config = self._kv_cache_config
            facts = compat.model_facts(self._vllm_config, config)
            layout, regions = describe(compat.cache_tensors(kv_caches), compat.group_facts(config), facts)
            epoch = compat.agree_on_epoch()
            instance = open_instance(self._options, layout, regions, epoch=epoch)
            self._handshake = KvxHandshake(epoch, layout.fingerprint())
            info = instance.info
            logger.info("kvx: %s rank %d serves at %s", info.instance, info.rank, info.address)
            return WorkerHalf(instance, layout)

        self._worker_half = _or_exit(start)

    def get_handshake_metadata(self) -> KvxHandshake | None:
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin with the step's plan; they come asynchronously."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM runs a request only after its whole load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results()
        return KVConnectorTransferResults(finished_recving=set(results.finished), failed_recving=set(results.failed))

    def build_connector_worker_meta(self) -> KvxWorkerMetadata | None:
        report = self._worker.take_report()
        return None if report is None else KvxWorkerMetadata(report)

    def shutdown(self) -> None:
        if self._worker_half is not None:
            self._worker_half.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # save_kv_layer has to run in each step

    # ------------------------------------------------------------ scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        first = metadata[min(metadata)]
        if not isinstance(first, KvxHandshake):  # in a MultiConnector vLLM passes on the first connector's only
            _refuse(ConfigError("in a MultiConnector name KvxConnector before every connector that has a handshake"))
        dp_size, dp_rank = compat.data_parallel(self._vllm_config)
        identity = Identity(first.epoch, first.fingerprint, len(metadata), dp_rank, dp_size)
        options = self._options
        self._scheduler_half = SchedulerHalf(
            options,
            identity,
            compat.groups(self._kv_cache_config),
            PoolPins(self._pool),
            partial(read_ticket, options),
            partial(make_ticket, options, epoch=identity.epoch, lease_s=options.lease_s),
        )

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request, compat.traits(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.blocks_allocated(request, compat.block_ids(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxMetadata:
        preempted = scheduler_output.preempted_req_ids or ()
        return KvxMetadata(self._scheduler.plan(compat.scheduled(scheduler_output), preempted))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.report(connector_output.kv_connector_worker_meta.report)
        connector_output.finished_recving = self._scheduler.loaded(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def get_kv_connector_stats(self) -> KvxStats | None:
        """vLLM asks workers and scheduler; the scheduler's half knows the outcome over all ranks."""
        data = None if self._scheduler_half is None else self._scheduler_half.take_stats()
        return None if data is None else KvxStats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxStats:
        return KvxStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxMetrics:
        return KvxMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        return self._scheduler_half is not None and self._scheduler_half.busy

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Never delayed: the scheduler's half has references of its own to what kvx holds.
        return False, self._scheduler.request_finished(request, block_ids, completed=compat.completed(request))


def _or_exit(start: Callable[[], T]) -> T:
    """What cannot work ends the process with one sentence and status 2; a traceback would hide it."""
    try:
        return start()
    except KvxError as error:
        _refuse(error)


def _refuse(error: KvxError) -> NoReturn:
    logger.critical("kvx cannot start: %s", error)
    raise SystemExit(2) from None
