"""Continuous batching: which tokens are computed in the next step, and who has which blocks.

Each step takes tokens of all running requests, in the order of their arrival, up to a budget: one
token of those that decode, a chunk of those whose prompt is not done. When blocks run out, the
youngest running request gives up its own and is computed again later.
"""

from __future__ import annotations

from collections import deque

from kvx_reference.engine.cache import BlockPool
from kvx_reference.engine.connector import Connector
from kvx_reference.engine.request import Request, Scheduled, Status


class Scheduler:
    """The queues. `step_tokens` is the budget of a step, `max_running` the most requests in it."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        step_tokens: int,
        max_running: int,
        connector: Connector | None = None,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._connector = connector
        self._prefix_caching = prefix_caching
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """The next step. Blocks for all its tokens are allocated; it is empty if nothing can be computed now."""
        budget = self._step_tokens
        step: list[Scheduled] = []
        before = self.preemptions
        for request in list(self.running):
            count = min(budget, request.known - request.computed)
            if count and request.status is Status.RUNNING and self._make_room(request, request.computed + count):
                step.append(Scheduled(request, request.computed, count))
                budget -= count
        # Whoever was preempted just now must not take the blocks back at once.
        while self.waiting and budget and len(self.running) < self._max_running and before == self.preemptions:
            request = self.waiting[0]
            if not self._place(request, budget):
                break
            self.waiting.popleft()
            if request.status is Status.LOADING:
                continue
            request.status = Status.RUNNING
            self.running.append(request)
            count = min(budget, request.known - request.computed)
            step.append(Scheduled(request, request.computed, count))
            budget -= count
        return step

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for a running request, from younger ones if need be. False: it had to give up its own."""
        while not self._grow(request, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        blocks = self._pool.allocate(max(0, self._blocks(tokens) - len(request.blocks)))
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def _preempt(self, request: Request) -> None:
        if self._connector is not None:
            self._connector.preempted(request)
        self.running.remove(request)
        self.forget_cache(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def forget_cache(self, request: Request) -> None:
        """Give up its blocks: what it knows is computed again."""
        self._pool.release(request.blocks)
        request.blocks, request.computed, request.status = [], 0, Status.WAITING

    def _place(self, request: Request, budget: int) -> bool:
        """Blocks for a waiting request: for its first chunk, or for all it knows where a connector loads some."""
        if request.blocks:  # its load is done
            return self._grow(request, min(request.known, request.computed + budget))
        hits = self._find(request)
        local = len(hits) * self._block_size
        external = self._connector.external_tokens(request, local) if self._connector is not None else 0
        tokens = request.known if external else min(request.known, local + budget)
        self._pool.share(hits)
        new = self._pool.allocate(self._blocks(tokens) - len(hits))
        if new is None:
            self._pool.release(hits)
            return False
        request.blocks, request.computed, request.found = hits + new, local, local
        if external:
            request.status, request.awaited = Status.LOADING, min(local + external, request.known)
            self.loading[request.id] = request
        if self._connector is not None:
            self._connector.allocated(request, external)
        return True

    def _find(self, request: Request) -> list[int]:
        """Blocks of a known prefix; at least the last token is computed, for its logits."""
        if not self._prefix_caching:
            return []
        return self._pool.find(request.hashes((request.known - 1) // self._block_size, self._block_size))

    def loaded(self, request: Request) -> None:
        """What was awaited is in the cache; the request runs next. Its last token is computed here, for its logits."""
        del self.loading[request.id]
        self.advance(request, request.awaited)
        request.computed = min(request.computed, request.known - 1)
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def load_failed(self, request: Request) -> None:
        """It is computed here, from new blocks: the old ones may still be written to."""
        del self.loading[request.id]
        self.forget_cache(request)
        self.waiting.appendleft(request)

    def advance(self, request: Request, computed: int) -> None:
        """Keys and values of the first `computed` tokens are complete; full blocks can be found from now on."""
        before, request.computed = request.computed, computed
        if self._prefix_caching:
            full = computed // self._block_size
            hashes = request.hashes(full, self._block_size)
            for at in range(before // self._block_size, full):
                self._pool.remember(request.blocks[at], hashes[at])

    def remove(self, request: Request) -> None:
        """The request has ended, wherever it stood."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif self.loading.pop(request.id, None) is None:
            self.waiting.remove(request)
        self.forget_cache(request)
        request.status = Status.FINISHED

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
