"""The workers of one transport: the one that takes new work, and those that end what they had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from attrs import define, field, frozen

from kvx_nixl.backends import Backend
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions
from kvx_nixl.worker import ATTEND_S, Closed, Opened, Result, Worker

_MAX_HUNG = 8
_LINGER_S = 30.0
"""How long a retired worker may take to end what it has; then it drops it."""
_UNUSED_S = 30.0
"""How long a peer's agent is remembered after its last connection."""


_ENDED_S = 1.0
"""More than a thread needs that has said its last word."""


class Learner(Protocol):
    """Who wants a peer's agent to be known."""

    def learnt(self, error: str) -> None: ...


@define(eq=False)
class _Known:
    """A peer's agent in the present worker."""

    metadata: bytes
    error: str | None = None
    """None: NIXL is still adding it."""
    waiting: list[Learner] = field(factory=list)
    unused_since: float | None = None


@frozen
class _Retired:
    worker: Worker
    since: float


class Crew:
    """Every method belongs to the runtime's thread."""

    def __init__(self, backend: Backend, options: Options, prefix: str, tell: Callable[[], None]) -> None:
        self.metadata = b""
        self.error = ""
        """Why there is no worker and will be none."""
        self._backend = backend
        self._options = options
        self._prefix = prefix
        self._tell = tell
        self._serial = 0
        self._worker: Worker | None = None
        self._retired: list[_Retired] = []
        self._known: dict[str, _Known] = {}
        self._met = 0

    @property
    def full(self) -> bool:
        """Has the present agent met as many others as it can?"""
        return self._met >= self._backend.max_peers

    @property
    def worker(self) -> Worker | None:
        """None while its agent is being made."""
        return self._worker if self.metadata else None

    def _all(self) -> list[Worker]:
        present = [self._worker] if self._worker is not None else []
        return [*(retired.worker for retired in self._retired), *present]

    @property
    def busy(self) -> bool:
        return bool(self._retired) or not self.metadata or any(known.waiting for known in self._known.values())

    def open(self, regions: Regions) -> None:
        """Start a worker; the present one is retired. Its agent's name is new: old ones meet stale state in peers."""
        if self._worker is not None:
            self._worker.retire()
            self._retired.append(_Retired(self._worker, time.monotonic()))
        self._worker, self.metadata = None, b""
        self._known.clear()
        self._met = 0
        now = time.monotonic()
        if sum(now - retired.since > _LINGER_S for retired in self._retired) > _MAX_HUNG:
            self.error = "too many agents have hung"
            return
        self._serial += 1
        self._worker = Worker(f"{self._prefix}{self._serial}", self._backend, self._options, regions, self._tell)

    def results(self) -> Iterator[Result]:
        """What the workers have told; of a worker's opening and end the crew itself takes note."""
        for worker in self._all():
            while worker.results:
                result = worker.results.popleft()
                if isinstance(result, Opened) and worker is self._worker:
                    self.metadata, self.error = result.metadata, result.error
                elif isinstance(result, Opened):
                    continue
                elif isinstance(result, Closed):
                    worker.join(_ENDED_S)
                    self._retired = [retired for retired in self._retired if retired.worker is not worker]
                yield result

    def tick(self, now: float) -> str | None:
        """The call in which the present worker hangs, if it does."""
        for retired in self._retired:
            if now - retired.since > _LINGER_S:
                retired.worker.end()
        return self._worker.hangs(now) if self._worker is not None else None

    def attend(self, seconds: float | None) -> None:
        """Retired workers too: a peer may still write to what it knows of them."""
        for worker in self._all():
            worker.attend(ATTEND_S if seconds is None else seconds)

    def close(self, seconds: float) -> bool:
        """Have all agents been destroyed in time?"""
        workers = self._all()
        for worker in workers:
            worker.end()
        until = time.monotonic() + seconds
        ended = [worker.join(max(0.0, until - time.monotonic())) for worker in workers]
        return all(ended)

    # ------------------------------------------------------------ peers' agents

    def learn(self, learner: Learner, name: str, metadata: bytes) -> None:
        """Add it once: NIXL may block while it adds."""
        worker = self.worker
        if worker is None:
            learner.learnt("no agent is ready here")
            return
        known = self._known.get(name)
        if known is None or known.metadata != metadata or known.error:
            known = self._known[name] = _Known(metadata)
            self._met += 1
            worker.add(name, name, metadata)
        known.unused_since = None
        if known.error is None:
            known.waiting.append(learner)
        else:
            learner.learnt("")

    def added(self, worker: Worker, name: str, error: str) -> None:
        known = self._known.get(name)
        if worker is not self._worker or known is None:
            return
        known.error = error
        waiting, known.waiting = known.waiting, []
        for learner in waiting:
            learner.learnt(error)

    def keeps_unused(self, used: set[str]) -> bool:
        """Whether an agent waits to be forgotten."""
        return not self._known.keys() <= used

    def forget_unused(self, used: set[str], now: float) -> None:
        """Agents of peers that have left are removed after a while."""
        for name, known in list(self._known.items()):
            if name in used:
                known.unused_since = None
            elif known.unused_since is None:
                known.unused_since = now
            elif now - known.unused_since > _UNUSED_S and self._worker is not None:
                del self._known[name]
                self._worker.forget(name)
