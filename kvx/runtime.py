"""The I/O shell of one rank: one thread, one selector, around the endpoint.

The engine's thread only appends to a queue and pops from another (R12). The wake descriptor is
written only while the runtime sleeps, so a busy engine step costs one `deque.append`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvx.control import ControlChannel
from kvx.core.endpoint import Endpoint
from kvx.core.errors import LayoutMismatch, LocalProtocolError, TransportError
from kvx.core.events import (
    Action,
    Cancel,
    Connect,
    Digest,
    Digested,
    Disconnect,
    Drain,
    EngineEvent,
    Event,
    Expose,
    Fence,
    Fenced,
    Forbid,
    Forbidden,
    Introduce,
    OpDone,
    OpFailed,
    Permit,
    Post,
    Report,
    Send,
    Stage,
)
from kvx.core.model import InstanceInfo, News, Outcome, Peer, Reason, Released
from kvx.memory import Memory
from kvx.traffic import Traffic, table
from kvx.transport import Access, Transport

CLOSE_S = 2.0
"""How long `close` lets aborted transfers and last words leave."""

_log = logging.getLogger(__name__)


class Runtime:
    """Runs the endpoint of one rank until `close`.

    `transports` are by name, in the operator's order; `choose` picks the one to a peer;
    `left_out` tells why others that the operator named do not work here; `observe` is told of
    every outcome, on this thread. Owns all of them and closes them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        control: ControlChannel,
        transports: Mapping[str, Transport],
        memory: Memory,
        *,
        choose: Callable[[InstanceInfo], str],
        left_out: Mapping[str, str] | None = None,
        observe: Callable[[Outcome], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._control = control
        self._transports = transports
        self._memory = memory
        self._choose = choose
        self._left_out = left_out or {}
        self._observe = observe
        self._clock = clock
        self._inbox: deque[Sequence[EngineEvent]] = deque()
        self._news: deque[News] = deque()
        self._traffic = {name: Traffic() for name in transports}
        self._peer_transport: dict[Peer, str] = {}
        self._common: dict[Peer, list[str]] = {}
        self._op_transport: dict[int, str] = {}
        self._op_post: dict[int, Post] = {}
        self._forbidding: dict[str, tuple[int, bool]] = {}
        self._fencing: dict[tuple[Peer, int], int] = {}
        self._permitted: dict[str, set[str]] = {}
        self._failed: str | None = None
        self._refused: set[str] = set()
        self._asleep = False
        self._closing: float | None = None
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wakeups = 0
        """Times that the thread has left its wait."""
        self.errors = 0
        """Events that ended in an exception; each is logged."""
        endpoint.status = self.snapshot
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(control.fileno(), selectors.EVENT_READ)
        for transport in transports.values():
            descriptor = transport.fileno()
            if descriptor is not None:
                self._selector.register(descriptor, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"kvx-{endpoint.info.peer}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------- the engine's thread

    def put(self, events: Sequence[EngineEvent]) -> None:
        """Enqueue a batch; never blocks."""
        self._inbox.append(events)
        if self._failed is not None:  # looked at after the append: else it could fail in between and see none of these
            self._refuse()
        elif self._asleep:
            os.eventfd_write(self._wake, 1)

    def _refuse(self) -> None:
        """Nothing runs any more, so nothing of what is left was begun: the engine hears that at once."""
        while True:
            try:
                events = self._inbox.popleft()
            except IndexError:  # the engine's thread and the one that has failed may both be here
                return
            for event in events:
                if isinstance(event, (Expose, Stage)) and event.transfer not in self._refused:
                    self._refused.add(event.transfer)
                    detail = f"kvx has stopped: {self._failed}"
                    self._news.append(Outcome(event.transfer, False, Reason.OTHER, detail))
                    self._news.append(Released(event.transfer))

    def news(self) -> list[News]:
        """Dequeue everything that was reported; never blocks."""
        taken = []
        while self._news:
            taken.append(self._news.popleft())
        return taken

    def snapshot(self) -> dict[str, object]:
        """The endpoint's counters and the shell's own; `kvx status` answers with them."""
        routes = {str(peer): name for peer, name in list(self._peer_transport.items())}
        return {
            **self._endpoint.snapshot(),
            "wakeups": self.wakeups,
            "errors": self.errors,
            "fallbacks": sum(traffic.fallbacks for traffic in self._traffic.values()),
            "transports": table(self._traffic, routes, self._left_out),
            "control": dict(self._control.stats),
        }

    def close(self) -> None:
        """Abort what is open, tell the peers, stop the thread. Bounded by about `CLOSE_S`."""
        if os.getpid() != self._pid or self._closing is not None:
            return
        self._closing = self._clock() + CLOSE_S
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_S + 5)

    # --------------------------------------------------------- the runtime's thread

    def _run(self) -> None:
        try:
            drained = False
            while not self._finished():
                if self._closing is not None and not drained:
                    drained = True
                    self._handle(Drain(0.0))
                self._wait()
                self._turn()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must not wait for ever
            _log.critical("the runtime of %s has stopped", self._endpoint.info.peer, exc_info=True)
            self._collapse(error)
        finally:
            self._selector.close()
            for name, transport in self._transports.items():
                try:
                    transport.close()
                except Exception:  # noqa: BLE001 - one transport must not keep the others open
                    _log.exception("transport %r did not close", name)
            self._control.close()

    def _collapse(self, error: Exception) -> None:
        """This thread cannot go on: every open request fails; its blocks stay out, for nothing proves them safe."""
        self._failed = f"{type(error).__name__}: {error}"
        for transfer in self._endpoint.engaged():
            self._refused.add(transfer)
            self._news.append(Outcome(transfer, False, Reason.OTHER, f"kvx has stopped: {self._failed}"))
        self._refuse()

    def _finished(self) -> bool:
        """Closing is over: nothing is open, and the peers have read the last words (or time is up)."""
        if self._closing is None:
            return False
        if self._clock() >= self._closing:
            return True
        return not (self._inbox or self._endpoint.busy) and self._control.hang_up()

    def _wait(self) -> None:
        self._asleep = True
        if self._inbox:
            self._asleep = False
            return
        self._selector.select(self._timeout())
        self._asleep = False
        self.wakeups += 1

    def _timeout(self) -> float | None:
        moments = [self._endpoint.deadline(), self._control.deadline(), self._closing]
        due = min((moment for moment in moments if moment is not None), default=None)
        timeout = None if due is None else max(0.0, due - self._clock())
        if self._op_transport:
            polls = [transport.idle_poll_s for transport in self._transports.values()]
            timeout = min((p for p in (*polls, timeout) if p is not None), default=None)
        return timeout

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._inbox:
            for wish in self._inbox.popleft():
                self._handle(wish)
        for event in self._control.poll():
            self._handle(event)
        for transport in self._transports.values():
            for completion in transport.poll():
                if isinstance(completion, Forbidden):
                    self._forbidden(completion)
                elif isinstance(completion, Fenced):
                    self._fenced(completion)
                elif not (isinstance(completion, OpFailed) and self._falls_back(completion)):
                    self._ended(completion)
                    self._handle(completion)
        self._perform(self._endpoint.expire(self._clock()))

    def _handle(self, event: Event) -> None:
        try:
            actions = self._endpoint.handle(event, self._clock())
        except LocalProtocolError:
            self.errors += 1
            _log.exception("refused: %s", event)
            actions = self._endpoint.expire(self._clock())
        self._perform(actions)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Send(link=link, envelope=envelope):
                self._control.send(link, envelope)
            case Post():
                self._post(action)
            case Cancel(op_id=op_id):
                self._op_post.pop(op_id, None)
                if op_id in self._op_transport:
                    self._transports[self._op_transport[op_id]].cancel(op_id)
            case Permit(transfer=transfer, peer=peer):
                # A peer may fall back to another common one, of which this side hears nothing.
                names = list(self._transports) if peer is None else self._common[peer]
                self._permitted.setdefault(transfer, set()).update(names)
                for name in names:
                    self._transports[name].permit(transfer, peer, action.op, action.ranges, action.stamp)
            case Forbid(transfer=transfer):
                self._forbid(transfer)
            case Fence(peer=peer, generation=generation):
                self._fencing[peer, generation] = len(self._common[peer])
                for name in self._common[peer]:
                    self._transports[name].fence(peer, generation)
            case Digest():
                self._handle(Digested(action.transfer, action.peer, self._sum(action)))
            case Report(news=news):
                self._news.append(news)
                if isinstance(news, Outcome):
                    self._observe(news)
            case Connect(address=address):
                self._control.connect(address)
            case Disconnect(link=link, detail=detail):
                self._control.disconnect(link, detail)
            case Introduce():
                self._introduce(action)

    def _introduce(self, action: Introduce) -> None:
        self._control.proven(action.link)
        peer = action.info.peer
        try:
            first = self._choose(action.info)
        except LayoutMismatch as mismatch:
            # The endpoint fails each transfer with this peer as it plans it; nothing is ever posted.
            _log.error("no transport to %s: %s", peer, mismatch)
            return
        reached, why = [], {}
        for common in [name for name in self._transports if name in action.metadata]:
            try:
                self._transports[common].connect(action.info, action.metadata[common])
                reached.append(common)
            except TransportError as error:
                why[common] = str(error)
                _log.error("transport %r cannot reach %s: %s", common, peer, error)
        self._common[peer] = sorted(reached or [first], key=lambda name: name != first)
        self._peer_transport[peer] = self._common[peer][0]
        if self._peer_transport[peer] != first:
            self._fallen_back(peer, first, why.get(first, "the peer has told nothing of it"))

    def _post(self, action: Post) -> None:
        name = self._op_transport[action.op_id] = self._peer_transport[action.peer]
        self._op_post[action.op_id] = action
        self._transports[name].post(action.op_id, action.peer, action.op, action.local, action.remote, action.stamp)

    def _ended(self, completion: OpDone | OpFailed) -> None:
        self._op_post.pop(completion.op_id, None)
        name = self._op_transport.pop(completion.op_id, None)
        if name is None:
            return
        if isinstance(completion, OpDone):
            self._traffic[name].moved(completion.nbytes)
        else:
            self._traffic[name].failed += 1

    def _falls_back(self, failed: OpFailed) -> bool:
        """Post the operation again with the next common transport; OpFailed has said that nothing of it can land."""
        action, name = self._op_post.get(failed.op_id), self._op_transport.get(failed.op_id)
        if action is None or name is None or failed.reason is not Reason.TRANSPORT:
            return False
        names = self._common[action.peer]
        behind = names[names.index(name) + 1 :] if name in names else []
        if not behind:
            return False
        self._traffic[name].failed += 1
        if self._peer_transport[action.peer] == name:
            self._peer_transport[action.peer] = behind[0]
            self._fallen_back(action.peer, name, failed.detail)
        self._post(action)
        return True

    def _fallen_back(self, peer: Peer, name: str, why: str) -> None:
        self._traffic[name].fell_back(str(peer), why)
        _log.warning("transport %r does not serve %s (%s): %r does", name, peer, why, self._peer_transport[peer])

    def _forbid(self, transfer: str) -> None:
        names = self._permitted.pop(transfer, set())
        if not names:
            self._handle(Forbidden(transfer))
            return
        grants = sum(self._transports[name].capabilities.access is Access.GRANT for name in names)
        if grants:
            self._forbidding[transfer] = (grants, grants == len(names))
        for name in names:
            self._transports[name].forbid(transfer)

    def _forbidden(self, completion: Forbidden) -> None:
        """Several transports may hold a permission: only their last answer counts, and only if each can give one."""
        left, by_all = self._forbidding.pop(completion.transfer, (1, True))
        if left > 1:
            self._forbidding[completion.transfer] = (left - 1, by_all)
        elif by_all:
            self._handle(completion)

    def _fenced(self, completion: Fenced) -> None:
        key = (completion.peer, completion.generation)
        left = self._fencing.pop(key, 1)
        if left > 1:
            self._fencing[key] = left - 1
        else:
            self._handle(completion)

    def _sum(self, action: Digest) -> str:
        """Order-independent sum over (key, CRC-32) of each piece, modulo 2^64."""
        total = np.uint64(0)
        for pieces, keys in action.units:
            table = zip(pieces.region.tolist(), pieces.offset.tolist(), pieces.length.tolist(), strict=True)
            crcs = np.array([zlib.crc32(self._memory.view(*piece)) for piece in table], dtype=np.uint64)
            with np.errstate(over="ignore"):
                mixed = (crcs + np.uint64(1)) * (keys.astype(np.uint64) * np.uint64(2) + np.uint64(0x9E3779B97F4A7C15))
                mixed ^= mixed >> np.uint64(29)
                total += (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64)
        return f"{int(total):016x}"
