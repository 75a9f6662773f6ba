"""The transport: the port's methods, links and visitors, and the workers that own NIXL's agents.

The runtime's thread does all of this and never calls NIXL; a worker's call that does not come back
costs an agent, which is replaced, and not the runtime. `access` is region and `fence` none: neither
deregistering nor removing an agent stops a WRITE in flight on any backend.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvx.core.errors import LocalProtocolError, RemoteProtocolError, TransportError
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Reason, Region, Stamp
from kvx.transport import Access, Capabilities, Completion, FenceScope
from kvx_nixl.backends import Backend
from kvx_nixl.bell import Connection, Dialling
from kvx_nixl.crew import Crew, Learner
from kvx_nixl.link import MAX_IN_FLIGHT, Link, Operation
from kvx_nixl.options import Options
from kvx_nixl.pulse import Pulse
from kvx_nixl.regions import Regions
from kvx_nixl.switchboard import Switchboard
from kvx_nixl.visitor import Visitor
from kvx_nixl.words import NONCE_BYTES, VERSION, Contact, Hello, Introduce, Status, agents_of
from kvx_nixl.worker import Added, Arrived, Closed, Moved, Opened, Worker

_log = logging.getLogger(__name__)
_QUICK_S, _SLOW_S = 0.1, 0.5
"""Periods of the pulse: while operations are in flight, and while anything else has a deadline."""
_CLOSE_S = 3.0
_RETIRED = 1024


class NixlTransport:
    """See `kvx.transport.Transport`. Every method belongs to the runtime's thread."""

    capabilities = Capabilities(
        ops=frozenset(Op),
        access=Access.REGION,
        fence=FenceScope.NONE,
        cancel=True,
        memory=frozenset({"cpu", "cuda"}),
        max_descriptors=1 << 18,
        max_in_flight=MAX_IN_FLIGHT,
    )
    idle_poll_s: float | None = None

    def __init__(self, backend: Backend, section: Mapping[str, Any]) -> None:
        """Raises ConfigError for options that cannot be used, ModuleNotFoundError where NIXL is not installed."""
        self.options = Options.of(section)
        backend.check(self.options)
        if importlib.util.find_spec("nixl") is None:
            raise ModuleNotFoundError("No module named 'nixl'", name="nixl")
        self.backend = backend
        self.regions = Regions([])
        self._incarnation = secrets.token_bytes(16)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pulse = Pulse()
        self._board = Switchboard(self.options, self._judge, self._proven)
        self._board.include(self._bell)
        self._board.include(self._pulse.fd)
        self._crew = Crew(backend, self.options, agents_of(self.options.peer, self._incarnation), self._tell)
        self._links: dict[Peer, Link] = {}
        self._ended_links: list[Link] = []
        self._visitors: dict[str, Visitor] = {}
        self._retired: dict[bytes, None] = {}
        self._posted: dict[int, Link] = {}
        self._numbers = 0
        self._completions: list[Completion] = []
        self._closed = False

    def _tell(self) -> None:
        os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------ set-up

    def register(self, regions: Sequence[Region]) -> None:
        """Waits for the first agent, at most `open_s`: what does not load is known here, and another transport used."""
        if self._board.listening or self._closed:
            raise TransportError("memory is registered once, before anything else")
        self.regions = Regions.of(regions)
        self._board.listen()
        self._crew.open(self.regions)
        until = time.monotonic() + self.options.open_s
        while self._crew.worker is None and not self._crew.error:
            left = until - time.monotonic()
            if left <= 0:
                raise TransportError(f"NIXL's agent has not started within {self.options.open_s} s")
            self._board.wait(min(left, 0.05))
            self._results()
        if self._crew.error:
            raise TransportError(f"NIXL cannot be used here: {self._crew.error}")

    def metadata(self) -> bytes:
        host, port = self._board.address
        return msgspec.msgpack.encode(Contact(VERSION, self.backend.name, host, port, self._incarnation))

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        contact = Contact.decode(metadata, self.backend.name)
        if not self.options.may_use(contact.host):
            raise TransportError(f"without a secret kvx_nixl connects on loopback only, not to {contact.host}")
        old = self._links.get(info.peer)
        if old is not None and (old.epoch, old.contact) == (info.epoch, contact):
            return
        self._links[info.peer] = Link(info.peer, info.epoch, contact, self, self.options.handshake_s)
        if old is None:
            return
        if old.contact.incarnation != contact.incarnation:
            self._retired[old.contact.incarnation] = None
            while len(self._retired) > _RETIRED:
                del self._retired[next(iter(self._retired))]
            visitor = self._visitors.get(str(info.peer))
            if visitor is not None and visitor.hello.incarnation == old.contact.incarnation:
                self._forget(str(info.peer))
            old.gone()
        if not old.idle:
            self._ended_links.append(old)
        elif old.connection is not None:
            old.reset()
        self._set_pulse()

    # ------------------------------------------------------------ the port

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        """Nothing: an introduced peer can reach every registered byte."""

    def forbid(self, transfer: str) -> None:
        """Nothing, and no Forbidden follows."""

    def fence(self, peer: Peer, generation: int) -> None:
        """Nothing, and no Fenced follows."""

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if op_id in self._posted:
            raise LocalProtocolError(f"operation {op_id} is in flight already")
        link = self._links.get(peer)
        if link is None or self._closed:
            self.report(OpFailed(op_id, Reason.TRANSPORT, f"{peer} is not known to the transport"))
            return
        try:
            if len(local) != len(remote) or (local.length != remote.length).any():
                raise TransportError("local and remote pieces differ in number or length")
            self.regions.locate(local)
        except TransportError as error:
            self.report(OpFailed(op_id, Reason.BOUNDS, str(error)))
            return
        if self._crew.error:
            self.report(OpFailed(op_id, Reason.TRANSPORT, f"NIXL cannot be used: {self._crew.error}"))
            return
        self._numbers += 1
        self._posted[op_id] = link
        link.post(Operation(op_id, self._numbers, op, local, remote, local.nbytes))
        self._set_pulse()

    def cancel(self, op_id: int) -> None:
        if op_id in self._posted:
            self._posted[op_id].cancel(op_id)

    def poll(self) -> list[Completion]:
        if self._closed:
            return []
        if self._pulse.fd in self._board.poll():
            self._pulse.clear()
            self._tick()
        self._results()
        refusing = [link.peer for link in self._links.values() if link.refused]
        if refusing:
            self._replace_agent(f"its agent refuses to post to {refusing[0]}")
        elif self._crew.full:
            self._replace_agent("its agent has met as many others as it can")
        self._set_pulse()
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        return self._board.fileno()

    def close(self) -> None:
        """The listener goes last, and only with the agents: whoever is refused knows that nothing moves any more."""
        if self._closed:
            return
        self._closed = True
        ended = self._crew.close(_CLOSE_S)
        self._board.hang_up()
        self._pulse.close()
        if ended:
            self._board.close()
            os.close(self._bell)
        else:
            # A thread that hangs in native code may still move bytes, and will write to this descriptor.
            _log.error("%s: an agent of NIXL has not ended", self.options.peer)
        self._completions.clear()

    # ------------------------------------------------------------ what the workers tell

    def _results(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for result in self._crew.results():
            match result:
                case Opened():
                    self._opened(result)
                case Added(key=learner, error=error):
                    assert isinstance(learner, str)
                    self._crew.added(result.worker, learner, error)
                case Moved(move=move):
                    for link in self._all_links():
                        link.moved(move)
                case Arrived(agent=agent, notes=notes):
                    for name, visitor in self._visitors.items():
                        if agent.startswith(agents_of(name, visitor.hello.incarnation)):
                            visitor.arrived(notes)
                case Closed(worker=worker):
                    for link in self._all_links():
                        link.closed(worker)

    def _opened(self, opened: Opened) -> None:
        if opened.error:
            _log.error("%s: NIXL cannot be used: %s", self.options.peer, opened.error)
            for link in self._links.values():
                link.lost(link.connection, TransportError(opened.error))
        for link in self._links.values():
            link.go_on()

    def _replace_agent(self, why: str) -> None:
        _log.warning("%s: %s; a new agent takes its place", self.options.peer, why)
        for link in self._links.values():
            link.refused = False
            link.reset()
        for visitor in self._visitors.values():
            if visitor.connection is not None:
                self.drop(visitor.connection)
                visitor.lost(visitor.connection, TransportError(why))
        self._crew.open(self.regions)

    def _all_links(self) -> list[Link]:
        return [*self._links.values(), *self._ended_links]

    # ------------------------------------------------------------ time

    def _tick(self) -> None:
        now = time.monotonic()
        self._board.expire(now)
        stale = [link.peer for link in self._all_links() if link.tick(now)]
        self._ended_links = [link for link in self._ended_links if not link.idle]
        hung = self._crew.tick(now)
        if hung:
            self._replace_agent(f"NIXL has not returned from {hung}")
        elif stale:
            self._replace_agent(f"operations to {stale[0]} are in doubt")
        for name, visitor in list(self._visitors.items()):
            if visitor.connection is None and now - visitor.left_at > self.options.handshake_s:
                self._forget(name)
        self._crew.forget_unused(self._used(), now)

    def _used(self) -> set[str]:
        """Agents of peers with which anything is open."""
        links = {link.agent for link in self._all_links() if link.connection is not None or link.flying}
        return links | {visitor.agent for visitor in self._visitors.values()}

    def _forget(self, name: str) -> None:
        visitor = self._visitors.pop(name)
        if visitor.connection is not None:
            self.drop(visitor.connection)

    def _set_pulse(self) -> None:
        if self._posted:
            self._pulse.every(_QUICK_S)
        elif self._busy():
            self._pulse.every(_SLOW_S)
        else:
            self._pulse.every(0)

    def _busy(self) -> bool:
        """Has anything but an operation a deadline?"""
        return (
            self._board.waiting
            or any(visitor.connection is None or visitor.awake for visitor in self._visitors.values())
            or self._crew.busy
            or self._crew.keeps_unused(self._used())
        )

    # ------------------------------------------------------------ who calls

    def _judge(self, hello: Hello) -> Status | None:
        if (hello.target, hello.target_incarnation) != (self.options.peer, self._incarnation):
            return Status.STALE
        return Status.AUTH if hello.incarnation in self._retired else None

    def _proven(self, hello: Hello, connection: Connection) -> None:
        visitor = self._visitors.get(hello.peer)
        if visitor is None or visitor.hello.incarnation != hello.incarnation:
            if visitor is not None:
                self._forget(hello.peer)
            visitor = self._visitors[hello.peer] = Visitor(hello, self)
        visitor.enter(connection)

    # ------------------------------------------------------------ what links and visitors use

    @property
    def worker(self) -> Worker | None:
        return self._crew.worker

    def introduction(self) -> Introduce:
        worker = self._crew.worker
        if worker is None:
            raise RemoteProtocolError("no agent is ready here")
        return Introduce.of(worker.name, self._crew.metadata, self.regions.places)

    def learn(self, learner: Learner, name: str, metadata: bytes) -> None:
        self._crew.learn(learner, name, metadata)

    def attend(self, seconds: float | None = None) -> None:
        if seconds == 0 and any(visitor.awake for visitor in self._visitors.values()):
            return
        self._crew.attend(seconds)

    def report(self, completion: OpDone | OpFailed) -> None:
        self._posted.pop(completion.op_id, None)
        self._completions.append(completion)
        self._tell()

    def dial(self, link: Link) -> Connection:
        hello = Hello(
            VERSION,
            self.options.peer,
            self._incarnation,
            str(link.peer),
            link.contact.incarnation,
            secrets.token_bytes(NONCE_BYTES),
        )
        return self._board.dial(link.contact, hello, Dialling(self.options.secret, hello, link.proven, link.lost))

    def watch(self, connection: Connection) -> None:
        self._board.watch(connection)

    def drop(self, connection: Connection) -> None:
        self._board.drop(connection)
