"""The engine: a queue, a pool of blocks, and steps in which every running request computes a chunk or one token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from abacus.model import BLOCK, Model

CHUNK = 2 * BLOCK
"""Prompt tokens of one request that a step computes at most."""
_REST_S = 0.2
_LOOK_S = 0.002
"""How often a mover is asked for news while nothing else is to be done."""

Deliver = Callable[[list[int], bool, Mapping[str, Any] | None], None]
"""New tokens, whether they are the last ones, and then what the mover adds to the answer."""


@define(eq=False)
class Request:
    """One prompt. `computed` of its tokens stand in the cache."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: Any
    deliver: Deliver
    blocks: list[int] = field(factory=list)
    output: list[int] = field(factory=list)
    computed: int = 0
    loading: int = 0
    """Tokens that a mover brings; the request waits for them."""


class Mover(Protocol):
    """Whoever brings parts of the cache from elsewhere, or takes them there. Called by the engine's thread alone."""

    def accepted(self, request: Request) -> None:
        """It may wait for long before it gets blocks."""
        ...

    def placed(self, request: Request) -> int:
        """It has its blocks. How many of its first tokens will be brought? `poll` tells when, unless it ends before."""
        ...

    def computed(self, step: Sequence[tuple[Request, int, int]]) -> None:
        """A step is over: of each of these requests it has cached the tokens from one position up to another."""
        ...

    def finished(self, request: Request, *, completed: bool) -> Mapping[str, Any] | None:
        """It loses its blocks after this. What to add to its answer; not `completed`: it was aborted."""
        ...

    def poll(self) -> list[tuple[str, bool]]:
        """Requests whose tokens were brought, and those for which it failed."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do although no request runs."""
        ...

    def close(self) -> None: ...


class Pool:
    """Blocks and how many have a use for each of them; one that nobody has is free."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = deque(range(blocks))
        self._uses = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """New blocks, or none where there are not enough."""
        taken = [self._free.popleft() for _ in range(count)] if count <= len(self._free) else []
        self.keep(taken)
        return taken

    def keep(self, blocks: Sequence[int]) -> None:
        """One more use of each."""
        for block in blocks:
            self._uses[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One use less."""
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free.append(block)


class Engine:
    """`submit`, `abort` and `close` may be called from any thread; all else belongs to the engine's own."""

    def __init__(self, model: Model, pool: Pool, mover: Mover | None = None) -> None:
        self._model, self.pool, self._mover = model, pool, mover
        self._bell = threading.Condition()
        self._arrived: list[Request] = []
        self._unwanted: set[str] = set()
        self._queue: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name="abacus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Raises ValueError for a request that never finds room."""
        if not request.prompt or _blocks(request) > self.pool.total:
            raise ValueError(f"{len(request.prompt)} prompt tokens and {request.max_tokens} new ones do not fit")
        with self._bell:
            self._arrived.append(request)
            self._bell.notify()

    def abort(self, request: str) -> None:
        with self._bell:
            self._unwanted.add(request)
            self._bell.notify()

    def close(self) -> None:
        with self._bell:
            self._open = False
            self._bell.notify()
        self._thread.join(10)
        if self._mover:
            self._mover.close()

    def _run(self) -> None:
        while self._open:
            self._admit()
            if not self._step():
                with self._bell:
                    if not (self._arrived or self._unwanted):
                        self._bell.wait(_LOOK_S if self._mover and self._mover.busy else _REST_S)

    def _admit(self) -> None:
        with self._bell:
            arrived, self._arrived = self._arrived, []
            unwanted, self._unwanted = self._unwanted, set()
        for one in arrived:
            self._queue.append(one)
            if self._mover:
                self._mover.accepted(one)
        for one in [one for one in (*self._queue, *self._running.values()) if one.id in unwanted]:
            self._finish(one, completed=False)
        for name, good in self._mover.poll() if self._mover else ():
            if name in self._running:
                self._loaded(self._running[name], good)
        while self._queue and (blocks := self.pool.take(_blocks(self._queue[0]))):
            request = self._queue.popleft()
            self._running[request.id] = request
            request.blocks = blocks
            request.loading = self._mover.placed(request) if self._mover else 0

    def _loaded(self, request: Request, good: bool) -> None:
        if good:  # the last token of a prompt is computed in any case: what follows it is not in the cache
            request.computed = min(request.loading, len(request.prompt) - 1)
        else:  # bytes may still land in these blocks: it computes in others
            self._leave(request)
            self._queue.appendleft(request)
        request.loading = 0

    def _step(self) -> bool:
        """Whether anything was computed."""
        step = []
        for request in [one for one in self._running.values() if not one.loading]:
            known = (*request.prompt, *request.output)
            stop = min(request.computed + CHUNK, len(known))
            token = self._model.forward(known[request.computed : stop], request.computed, request.blocks)
            step.append((request, request.computed, stop))
            request.computed = stop
            if stop == len(known):
                request.output.append(token)
        if self._mover and step:
            self._mover.computed(step)
        for request, _, stop in step:
            if stop >= len(request.prompt):
                if len(request.output) == request.max_tokens:
                    self._finish(request, completed=True)
                else:
                    request.deliver(request.output[-1:], False, None)
        return bool(step)

    def _finish(self, request: Request, *, completed: bool) -> None:
        added = self._mover.finished(request, completed=completed) if self._mover else None
        if request in self._queue:
            self._queue.remove(request)
        self._leave(request)
        request.deliver(request.output[-1:], True, added)

    def _leave(self, request: Request) -> None:
        self._running.pop(request.id, None)
        self.pool.drop(request.blocks)
        request.blocks, request.computed = [], 0


def _blocks(request: Request) -> int:
    """All that it can come to need: nothing is ever preempted."""
    return -(-(len(request.prompt) + request.max_tokens) // BLOCK)
