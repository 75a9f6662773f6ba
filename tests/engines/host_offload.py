"""vLLM's own OffloadingConnector on a machine without a GPU: its scheduler's half as it is, blocks copied by torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingWorker(OffloadingWorker):
    """One chunk is one block; a job is over when `submit_*` returns, and told at the next `get_finished`."""

    def __init__(self, tensors: list[torch.Tensor], chunks: int) -> None:
        self._cache = tensors
        self._store = [torch.empty((chunks, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in tensors]
        self._over: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, store in zip(self._cache, self._store, strict=True):
            store[torch.from_numpy(dst_spec.block_ids).long()] = cache[torch.from_numpy(src_spec.block_ids).long()]
        return self._done(job_id, len(src_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, store in zip(self._cache, self._store, strict=True):
            cache[torch.from_numpy(dst_spec.block_ids).long()] = store[torch.from_numpy(src_spec.block_ids).long()]
        return self._done(job_id, len(dst_spec.block_ids))

    def _done(self, job_id: int, blocks: int) -> bool:
        self._over.append(TransferResult(job_id, True, blocks, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever outstanding."""


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = HostOffloadingWorker([tensor.tensor for tensor in kv_caches.tensors], self.num_chunks)
        return self._worker
