"""The adapter driven without its engine, for `kvx bench callbacks`: every call that `Engine.step` makes to it."""

from __future__ import annotations

from collections.abc import Sequence

from kvx.bench.cache import BLOCK_TOKENS, Cache, describe
from kvx.config import Options
from kvx.core.errors import TransportError
from kvx.engine import EngineInstance
from kvx_reference.adapter import KvxConnector
from kvx_reference.engine.cache import BlockPool
from kvx_reference.engine.request import Request, Scheduled

RUNNING = 8
"""Requests that are decoded in each step."""
HELD = 20_000
"""Room in the pool's count: open transfers share one block, and each counts as one."""


class ReferenceSteps:
    """See `kvx.bench.callbacks.Steps`."""

    def __init__(self, cache: Cache) -> None:
        self.layout, region = describe(cache)
        self.regions = (region,)
        self._blocks = self.layout.num_blocks
        self._layers = len(self.layout.groups[0].layers)
        self._open: dict[str, Request] = {}
        self._ended: list[str] = []
        prompt = tuple(range(BLOCK_TOKENS))
        self._running = [
            Scheduled(Request(f"running {n}", prompt, blocks=[0, 0]), BLOCK_TOKENS, 1) for n in range(RUNNING)
        ]

    def start(self, instance: EngineInstance, options: Options) -> None:
        self._connector = KvxConnector(options, instance, BlockPool(self._blocks + HELD), BLOCK_TOKENS)

    def hold(self, count: int, block: int, address: str) -> None:
        """Prefills that are done, with tickets that nobody reads."""
        prompt = tuple(range(BLOCK_TOKENS))
        for number in range(count):
            params = {"do_remote_decode": True}
            request = Request(f"held {number}", prompt, params=params, blocks=[block], computed=len(prompt))
            self._connector.on_request(request)
            answer = self._connector.finished(request, completed=True)
            if not answer or not answer.get("do_remote_prefill"):
                raise TransportError(f"a prefill was not offered: {answer}")

    def load(self, number: int, blocks: Sequence[int], address: str) -> None:
        kvx = {"mode": "push", "transfer": f"load {number}", "from": address}
        prompt = tuple(range(len(blocks) * BLOCK_TOKENS))
        name = f"loading {number}"
        request = Request(name, prompt, params={"do_remote_prefill": True, "kvx": kvx}, blocks=list(blocks))
        self._open[name] = request
        self._connector.on_request(request)
        self._connector.allocated(request, self._connector.external_tokens(request, 0))

    def step(self) -> int:
        connector = self._connector
        loads = connector.poll()
        for layer in range(self._layers):
            connector.layer_computed(layer, self._running)
        connector.step_done(self._running)
        _ = connector.busy
        if loads.failed:
            raise TransportError(f"a load has failed: {loads.failed[0][1]}")
        self._ended += loads.done
        return len(loads.done)

    def leave(self) -> None:
        for name in self._ended:
            self._connector.finished(self._open.pop(name), completed=True)
        self._ended.clear()
