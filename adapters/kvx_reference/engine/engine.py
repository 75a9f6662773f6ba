"""The engine: requests in, one step after the other, tokens out. Used from one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from kvx_reference.engine.cache import BlockPool, KvCache
from kvx_reference.engine.config import ModelConfig, read_config
from kvx_reference.engine.connector import Connector, ConnectorFactory, Parts
from kvx_reference.engine.model import Chunk, Model
from kvx_reference.engine.request import Finish, Output, Request, Scheduled
from kvx_reference.engine.sampling import draw
from kvx_reference.engine.scheduler import Scheduler
from kvx_reference.engine.weights import assemble, load_tensors, random_tensors


class RequestError(Exception):
    """A request can never be served here; the text says why."""


@frozen
class Settings:
    """Sizes: `blocks` of `block_size` tokens, `step_tokens` computed at most in a step.

    `recompute` says what becomes of a request whose load failed: it is computed here, or it fails.
    """

    blocks: int = 512
    block_size: int = 16
    step_tokens: int = 256
    max_running: int = 32
    prefix_caching: bool = True
    recompute: bool = True


class Engine:
    """See the module. `connector` is called with the engine's parts and `connector_options`."""

    def __init__(
        self,
        model: Model,
        settings: Settings | None = None,
        connector: ConnectorFactory | None = None,
        connector_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings = settings or Settings()
        self.cache = KvCache(model.config, settings.blocks, settings.block_size)
        self.pool = BlockPool(settings.blocks)
        parts = Parts(model.config, self.cache, self.pool)
        self._connector: Connector | None = connector(parts, connector_options or {}) if connector else None
        self.scheduler = Scheduler(
            self.pool,
            settings.block_size,
            settings.step_tokens,
            settings.max_running,
            self._connector,
            prefix_caching=settings.prefix_caching,
        )
        self._requests: dict[str, Request] = {}
        self.counters: Counter[str] = Counter()

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that no state of this engine could serve."""
        config, settings = self.model.config, self.settings
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if not all(0 <= token < config.vocab_size for token in request.prompt):
            raise RequestError(f"the prompt has tokens outside of 0..{config.vocab_size - 1}")
        if request.sampling.max_tokens < 1:
            raise RequestError("max_tokens has to be at least 1")
        room = min(config.max_position, settings.blocks * settings.block_size)
        if request.longest > room:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_tokens} new ones "
                f"do not fit: the model and its cache have room for {room}"
            )

    def add(self, request: Request) -> None:
        """Raises RequestError; an id may be used again when its request has ended."""
        self.check(request)
        if request.id in self._requests:
            raise RequestError(f"there is a request {request.id} already")
        self._requests[request.id] = request
        if self._connector is not None:
            self._connector.on_request(request)
        self.scheduler.add(request)
        self.counters["requests"] += 1

    def end(self, request_id: str, finish: Finish, error: str = "") -> Output | None:
        """End a request now; None if it has ended before."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        params = None
        if self._connector is not None:
            params = self._connector.finished(request, completed=finish in (Finish.STOP, Finish.LENGTH))
        self.scheduler.remove(request)
        self.counters[finish.value] += 1
        return Output(request_id, finish=finish, error=error, params=params)

    @property
    def has_work(self) -> bool:
        """Whether a step may compute something."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def is_loading(self) -> bool:
        """Whether requests wait for a connector's news."""
        return bool(self.scheduler.loading)

    @property
    def is_waiting(self) -> bool:
        """Whether steps are needed although there is nothing to compute: the connector has news to come."""
        return self.is_loading or (self._connector is not None and self._connector.busy)

    def step(self) -> list[Output]:
        """Take what loads have brought, compute the next tokens, and tell what came of it."""
        outputs = self._take_loads()
        step = self.scheduler.schedule()
        if step:
            outputs += self._compute(step)
        elif self._connector is not None and self.scheduler.waiting:
            self._connector.starving()
        return outputs

    def _take_loads(self) -> list[Output]:
        if self._connector is None:
            return []
        loads = self._connector.poll()
        for request_id in loads.done:
            if (request := self.scheduler.loading.get(request_id)) is not None:
                self.counters["loads"] += 1
                self.scheduler.loaded(request)
        outputs = []
        for request_id, reason in loads.failed:
            if (request := self.scheduler.loading.get(request_id)) is None:
                continue
            self.counters["failed_loads"] += 1
            if self.settings.recompute:
                self.scheduler.load_failed(request)
            elif output := self.end(request_id, Finish.ERROR, f"the cache could not be loaded: {reason}"):
                outputs.append(output)
        return outputs

    def _compute(self, step: Sequence[Scheduled]) -> list[Output]:
        connector = self._connector
        chunks = [Chunk(item.request.tokens(item.start, item.stop), item.start, item.request.blocks) for item in step]
        on_layer = None if connector is None else lambda layer: connector.layer_computed(layer, step)
        logits = self.model.forward(chunks, self.cache, on_layer)
        if connector is not None:
            connector.step_done(step)
        outputs = []
        for item, scores in zip(step, logits, strict=True):
            request = item.request
            self.scheduler.advance(request, item.stop)
            if item.stop == request.known:
                drawn = draw(scores, request.sampling, request.random)
                request.output.append(drawn.token)
                finish = self._finish(request)
                ended = None if finish is None else self.end(request.id, finish)
                outputs.append(Output(request.id, drawn, finish, params=ended.params if ended else None))
        self.counters["steps"] += 1
        self.counters["tokens"] += len(outputs)
        return outputs

    def _finish(self, request: Request) -> Finish | None:
        if request.output[-1] in self.model.config.eos and not request.sampling.ignore_eos:
            return Finish.STOP
        return Finish.LENGTH if len(request.output) >= request.sampling.max_tokens else None

    def cached(self, tokens: Sequence[int]) -> bytes:
        """Keys and values of the known blocks with which these tokens begin, as they stand in the cache:
        `[token][layer][head][key, value]`, float32. For a look from outside, while no request runs."""
        size = self.settings.block_size
        blocks = self.pool.find(Request("", tuple(tokens)).hashes(len(tokens) // size, size))
        return self.cache.array[:, blocks].transpose(1, 2, 0, 3, 4).tobytes()

    def snapshot(self) -> dict[str, Any]:
        """Figures for a person or a test; they may be asked for from another thread."""
        scheduler, pool = self.scheduler, self.pool
        return {
            "waiting": len(scheduler.waiting),
            "loading": len(scheduler.loading),
            "running": len(scheduler.running),
            "blocks": {"total": pool.total, "free": pool.free},
            "counters": {**self.counters, "preemptions": scheduler.preemptions},
        }

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()


def load_model(folder: Path) -> Model:
    """The model of a folder in Hugging Face's format. Raises ModelError."""
    config = read_config(folder)
    return Model(config, assemble(config, load_tensors(folder)))


def random_model(config: ModelConfig, seed: int) -> Model:
    """A model whose weights are drawn from `seed`."""
    return Model(config, assemble(config, random_tensors(config, seed)))
