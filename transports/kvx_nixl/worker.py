"""The thread that owns an agent. It may hang in native code: then it is abandoned, and nothing waits for it.

It polls only while operations are in flight or a peer has rung, since NIXL's own progress thread
takes a core for ever; in between it sleeps. What is abandoned goes on if its call returns: it ends
what it has, and takes nothing new.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from attrs import frozen

from kvx.core.errors import TransportError
from kvx_nixl.agent import Agent, NixlError
from kvx_nixl.backends import Backend
from kvx_nixl.moves import Move, Size
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions

_log = logging.getLogger(__name__)
_SPIN_S = 0.02
"""How long the worker polls without a pause after something has happened: the rate of a TCP backend depends on it."""
_RUNG_SPIN_S = 0.15
"""The same at a target, which sees nothing of a READ: longer than the pause between two rings."""
_LONG_NAP_S = 0.02
_IDLE_S = 1.0
"""How often an idle agent is looked at, so that connections of dead peers do not stay."""
_ADD_TRIES = 3
"""LIBFABRIC reports the error of another peer's broken connection from whatever call comes next."""
ATTEND_S = 0.5
"""How long a ring keeps a worker awake."""


@frozen
class Opened:
    """The agent is ready, or why it is not."""

    worker: Worker
    metadata: bytes
    error: str


@frozen
class Added:
    worker: Worker
    key: object
    error: str


@frozen
class Moved:
    """NIXL has ended what it will; `move` tells how."""

    worker: Worker
    move: Move


@frozen
class Arrived:
    """Notifications of one peer's agent."""

    worker: Worker
    agent: str
    notes: list[bytes]


@frozen
class Closed:
    """The agent is destroyed: nothing of this process moves its bytes any more."""

    worker: Worker


Result = Opened | Added | Moved | Arrived | Closed


class Worker:
    """`results` are appended, then `tell` is called, from the worker's thread.

    A `worker` in a result names the one that tells; its `name` is that of its agent.
    """

    def __init__(
        self, name: str, backend: Backend, options: Options, regions: Regions, tell: Callable[[], None]
    ) -> None:
        self.name = name
        self.results: deque[Result] = deque()
        self.moves: list[Move] = []
        self._retired_at: float | None = None
        self._started = time.monotonic()
        self._backend = backend
        self._options = options
        self._regions = regions
        self._post_pieces, window_pieces = backend.pieces(options)
        self._window = Size(window_pieces, options.window_bytes)
        self._tell = tell
        self._agent: Agent | None = None
        self._destroyed = True
        self._commands: deque[Callable[[Agent], None]] = deque()
        self._forgotten: list[str] = []
        self._attend_until = 0.0
        self._lively_until = 0.0
        self._stopping = False
        self.turns = 0
        """Rounds of polling so far."""
        self._asleep = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the runtime's thread

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def asleep(self) -> bool:
        """Is nothing in flight, and has no peer rung lately?"""
        return not self.moves and time.monotonic() > self._attend_until

    def hangs(self, now: float) -> str | None:
        """The call that takes too long, if one does."""
        if not self.alive:
            return "its own thread, which has ended"
        agent = self._agent
        calling = ("opening the agent", self._started) if agent is None else agent.calling
        if calling is None:
            return None
        limit = self._options.open_s if agent is None else self._options.call_s
        return calling[0] if now - calling[1] > limit else None

    def attend(self, seconds: float = ATTEND_S) -> None:
        """Poll for so long: a peer has something in flight here."""
        now = time.monotonic()
        self._attend_until = now + seconds
        self._lively_until = now + min(seconds, _RUNG_SPIN_S)
        self._ring()

    def add(self, key: object, name: str, metadata: bytes) -> None:
        """Answered by Added."""

        def run(agent: Agent) -> None:
            error = ""
            for _ in range(_ADD_TRIES):
                try:
                    agent.add(name, metadata)
                except NixlError as failure:
                    error = str(failure)
                else:
                    error = ""
                    break
            self._report(Added(self, key, error))

        self._submit(run)

    def forget(self, name: str) -> None:
        """Remove a peer's agent, once nothing to it is in flight."""

        self._submit(lambda _: self._forgotten.append(name))

    def start(self, move: Move) -> None:
        """Answered by Moved."""

        def run(agent: Agent) -> None:
            move.begin(agent, self._options.post_bytes, self._post_pieces)
            self.moves.append(move)

        self._submit(run)

    def retire(self) -> None:
        """Take nothing new; end once nothing is in flight here and no peer rings any more."""
        self._retired_at = time.monotonic()
        self._ring()

    def end(self) -> None:
        """Drop everything, and destroy the agent."""
        self._stopping = True
        self._ring()

    def join(self, seconds: float) -> bool:
        """Wait for its end. Has it ended, and is its agent destroyed?"""
        self._thread.join(seconds)
        if not self.alive and self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        return not self.alive and self._destroyed

    def _submit(self, command: Callable[[Agent], None]) -> None:
        self._commands.append(command)
        self._ring()

    def _ring(self) -> None:
        if self._asleep and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the worker's thread

    def _report(self, result: Result) -> None:
        self.results.append(result)
        self._tell()

    def _run(self) -> None:
        try:
            self._backend.prepare(self._options)
            agent = Agent(self.name, self._backend, self._options, self._regions)
            metadata = agent.metadata()
        except (TransportError, ImportError, OSError) as error:
            self._report(Opened(self, b"", f"{type(error).__name__}: {error}"))
            return
        self._agent, self._destroyed = agent, False
        self._report(Opened(self, metadata, ""))
        try:
            while not self._stopping and not self._done():
                self._turn(agent)
                self._rest()
        except Exception:  # noqa: BLE001 - whoever waits for this thread must hear of its end
            _log.critical("the worker of %s has stopped", self.name, exc_info=True)
            return
        self._end(agent)

    def _done(self) -> bool:
        if self._retired_at is None or self.moves or self._commands:
            return False
        return time.monotonic() > max(self._attend_until, self._retired_at + ATTEND_S)

    def _turn(self, agent: Agent) -> None:
        self.turns += 1
        for _ in range(len(self._commands)):
            self._commands.popleft()(agent)
        happened = False
        try:
            for peer, notes in agent.notifications().items():
                happened = True
                self._report(Arrived(self, peer, notes))
        except NixlError as error:
            # An error of one peer's connection may come out of any call: the moves find out whose it was.
            _log.warning("%s: %s", self.name, error)
        flying: dict[str, Size] = {}
        for move in self.moves:
            flying[move.agent] = flying.get(move.agent, Size()) + move.flying
        for move in list(self.moves):
            before = move.flying
            happened |= move.advance(agent, self._window - flying[move.agent])
            flying[move.agent] += move.flying - before
            if move.ended:
                move.end(agent)
                self.moves.remove(move)
                self._report(Moved(self, move))
        if len(self.moves) > 1:
            self.moves.append(self.moves.pop(0))
        if happened:
            self._lively_until = time.monotonic() + _SPIN_S
        for name in [name for name in self._forgotten if name not in flying]:
            self._forgotten.remove(name)
            try:
                agent.remove(name)
            except NixlError as error:
                _log.warning("%s: %s", self.name, error)

    def _rest(self) -> None:
        now = time.monotonic()
        if self.moves or now < self._attend_until:
            # Who stalls costs ever less.
            timeout = min(_LONG_NAP_S, max(0.0, (now - self._lively_until) / 20))
        else:
            timeout = _IDLE_S
        self._asleep = True
        if self._commands or self._stopping:
            timeout = 0.0
        elif self._retired_at is not None:
            timeout = min(timeout, ATTEND_S)
        if timeout == 0.0:
            # On a busy machine a thread that spins its share away is what the others then wait for: measured,
            # 4 KiB took 17 ms without this line and 1.2 ms with it. `select` lets go of the interpreter.
            os.sched_yield()
        select.select([self._wake], [], [], timeout)
        self._asleep = False
        if timeout:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)

    def _end(self, agent: Agent) -> None:
        for move in self.moves:
            move.end(agent)
        self.moves.clear()
        try:
            agent.close()
        except NixlError as error:
            _log.warning("%s: %s", self.name, error)
            return
        self._agent, self._destroyed = None, True
        self._report(Closed(self))
