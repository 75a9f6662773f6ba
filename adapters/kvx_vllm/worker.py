"""The connector's half in a vLLM worker: owns the rank's kvx instance, decides nothing.

The engine's thread only puts events and takes news (R12): one put per step for what the
scheduler's half decided, one per layer for the blocks that layer has completed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from attrs import frozen

from kvx.core.events import EngineEvent, Stage
from kvx.core.model import BlockTable, Layout, Mode, Outcome, Part, Reason, Released, Role
from kvx.engine import EngineInstance
from kvx_vllm.metadata import Ended, Plan, Ready, WorkerReport

# vLLM configures handlers for loggers below "vllm" only.
logger = logging.getLogger("vllm.kvx.worker")

MAX_EARLY = 1024
"""More than there are requests between two steps of vLLM."""


@frozen
class Results:
    """Requests whose load is over; failed ones are in both sets, as vLLM wants it."""

    finished: frozenset[str]
    failed: frozenset[str]


class WorkerHalf:
    """See the module. `layout` is the one that `instance` was opened with."""

    def __init__(self, instance: EngineInstance, layout: Layout) -> None:
        self._instance = instance
        self._groups = {layer.name: group.index for group in layout.groups for layer in group.layers}
        self._plan = Plan()
        self._fired: set[str] = set()
        self._loads: dict[str, str] = {}
        """Transfer to request, while vLLM waits for its outcome."""
        self._early: dict[str, None] = {}
        """Transfers that ended before vLLM had blocks for them; with overlapping steps the scheduler learns it late."""
        self._refused: set[str] = set()
        self._report = WorkerReport()

    def begin_step(self, plan: Plan) -> None:
        """Before the forward: hand over what the scheduler's half decided."""
        self._plan = plan
        self._fired.clear()
        self._refused |= set(plan.refused)
        for transfer, request in plan.loads:
            if transfer in self._early:
                self._refused.add(request)
            else:
                self._loads[transfer] = request
        if plan.events:
            self._instance.put(plan.events)

    def layer_saved(self, layer: str) -> None:
        """In the forward: this layer's keys and values of the step are in the cache."""
        if self._plan.ready and layer in self._groups and layer not in self._fired:
            self._fired.add(layer)
            self._put(self._whole_blocks(layer))

    def end_step(self) -> None:
        """After the forward: what no hook has told, and the last part of each request that is complete."""
        if not self._plan.ready:
            return
        events: list[EngineEvent] = []
        for layer in self._groups:
            if layer not in self._fired:
                events += self._whole_blocks(layer)
        events += [_last(ready) for ready in self._plan.ready if ready.last]
        self._plan = Plan()
        self._put(events)

    def _put(self, events: Iterable[EngineEvent]) -> None:
        if batch := list(events):
            self._instance.put(batch)

    def _whole_blocks(self, layer: str) -> list[EngineEvent]:
        at = self._groups[layer]
        events: list[EngineEvent] = []
        for ready in self._plan.ready:
            if count := ready.full[at]:
                blocks = [ready.blocks[at][:count] if group == at else () for group in range(len(ready.blocks))]
                part = Part((layer,), ready.first, BlockTable.of(*blocks))
                events.append(Stage(ready.transfer, Mode.PUSH, part, False, ready.tokens, prompt=ready.prompt))
        return events

    def results(self) -> Results:
        """Take the news: loads that are over by now, and for the scheduler's half the report."""
        ended: dict[str, Ended] = {}
        released: dict[str, int] = {}
        finished = set(self._refused)
        failed = set(self._refused)
        self._refused.clear()
        for news in self._instance.news():
            if isinstance(news, Outcome):
                ended[news.transfer] = _ended(news)
                request = self._loads.pop(news.transfer, None)
                if request is None:
                    self._remember(news)
                else:
                    finished.add(request)
                    if not news.ok:
                        failed.add(request)
                _log(news, request)
            elif isinstance(news, Released):
                released[news.transfer] = 1
        self._report = self._report.merged(WorkerReport(ended, released, frozenset(finished)))
        return Results(frozenset(finished), frozenset(failed))

    def _remember(self, outcome: Outcome) -> None:
        if outcome.role is not Role.PRODUCER and not outcome.ok:
            self._early[outcome.transfer] = None
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        return None if report == WorkerReport() else report

    def snapshot(self) -> Mapping[str, object]:
        return self._instance.snapshot()

    def close(self) -> None:
        self._instance.close()


def _last(ready: Ready) -> Stage:
    """What is left of the prompt: at most one partly filled block per group, in all layers."""
    first = tuple(start + whole for start, whole in zip(ready.first, ready.full, strict=True))
    rest = (blocks[whole:] for blocks, whole in zip(ready.blocks, ready.full, strict=True))
    part = Part(None, first, BlockTable.of(*rest))
    return Stage(ready.transfer, Mode.PUSH, part, True, ready.tokens, prompt=ready.prompt)


def _ended(outcome: Outcome) -> Ended:
    return Ended(outcome.ok, outcome.mode, outcome.role, outcome.reason, outcome.detail, outcome.bytes, outcome.seconds)


def _log(outcome: Outcome, request: str | None) -> None:
    # The scheduler's half tells it once for all ranks; this is for whoever looks for one of them.
    reason = "ok" if outcome.ok else (outcome.reason or Reason.OTHER).value
    logger.debug("kvx: transfer %s, request %s, this rank: %s (%s)", outcome.transfer, request, reason, outcome.detail)
