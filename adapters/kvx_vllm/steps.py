"""Both halves of the connector driven without vLLM, for `kvx bench callbacks`.

`step` makes every call that the facade, `kvx_vllm.connector`, passes on in one step of vLLM 0.32. What is vLLM's own
is a double here: requests, and a pool of blocks that only answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from attrs import define, field

from kvx.bench.cache import BLOCK_TOKENS, Cache, describe
from kvx.config import Options
from kvx.core.errors import TransportError
from kvx.engine import EngineInstance
from kvx.instance import make_ticket, read_ticket
from kvx_vllm.pins import PoolPins
from kvx_vllm.records import Group, Identity, Scheduled
from kvx_vllm.scheduler import SchedulerHalf
from kvx_vllm.worker import WorkerHalf

RUNNING = 8
"""Requests that are decoded in each step."""
POOL = 40_000
"""The pool's count: open transfers share one block, and each counts as one."""


@define(eq=False)
class _Request:
    request_id: str
    kv_transfer_params: dict[str, Any]
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: list[int] = field(init=False)
    all_token_ids: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prompt_token_ids = self.all_token_ids = list(range(self.num_prompt_tokens))


class _Pool:
    """Answers as vLLM's BlockPool does, and counts no references."""

    num_gpu_blocks = POOL
    blocks = range(POOL)

    def touch(self, blocks: Iterable[int]) -> None: ...

    def free_blocks(self, blocks: Iterable[int]) -> None: ...

    def get_num_free_blocks(self) -> int:
        return POOL


class VllmSteps:
    """See `kvx.bench.callbacks.Steps`."""

    def __init__(self, cache: Cache) -> None:
        self.layout, region = describe(cache)
        self.regions = (region,)
        self._layers = [layer.name for layer in self.layout.groups[0].layers]
        self._open: dict[str, _Request] = {}
        self._ended: list[str] = []
        self._running = [Scheduled(f"running {number}", 500, 1, ((0,) * 32,)) for number in range(RUNNING)]

    def start(self, instance: EngineInstance, options: Options) -> None:
        epoch = instance.info.epoch
        self._worker = WorkerHalf(instance, self.layout)
        self._scheduler = SchedulerHalf(
            options,
            Identity(epoch, self.layout.fingerprint()),
            (Group(BLOCK_TOKENS),),
            PoolPins(_Pool()),
            partial(read_ticket, options),
            partial(make_ticket, options, epoch=epoch, lease_s=options.lease_s),
        )

    def hold(self, count: int, block: int, address: str) -> None:
        """Prefills that are done, with tickets that nobody reads."""
        for number in range(count):
            request = _Request(f"held {number}", {"do_remote_decode": True}, BLOCK_TOKENS, BLOCK_TOKENS)
            self._scheduler.on_new_request(request)
            answer = self._scheduler.request_finished(request, [[block]], completed=True)
            if not answer or not answer.get("do_remote_prefill"):
                raise TransportError(f"a prefill was not offered: {answer}")

    def load(self, number: int, blocks: Sequence[int], address: str) -> None:
        kvx = {"mode": "push", "transfer": f"load {number}", "from": address}
        params = {"do_remote_prefill": True, "kvx": kvx}
        request = _Request(f"loading {number}", params, len(blocks) * BLOCK_TOKENS, 0)
        self._open[request.request_id] = request
        self._scheduler.on_new_request(request)
        tokens, _ = self._scheduler.matched_tokens(request, 0)
        self._scheduler.blocks_allocated(request, [blocks], tokens)

    def step(self) -> int:
        scheduler, worker = self._scheduler, self._worker
        worker.begin_step(scheduler.plan(self._running, ()))
        for layer in self._layers:
            worker.layer_saved(layer)
        worker.end_step()
        results = worker.results()
        report = worker.take_report()
        if report is not None:
            scheduler.report(report)
        loaded = scheduler.loaded(results.finished, results.failed)
        scheduler.take_stats()
        _ = scheduler.busy
        if results.failed:
            raise TransportError(f"a load has failed: {', '.join(results.failed)}")
        self._ended += loaded
        return len(loaded)

    def leave(self) -> None:
        for name in self._ended:
            request = self._open.pop(name)
            self._scheduler.request_finished(request, [[]], completed=True)
        self._ended.clear()
