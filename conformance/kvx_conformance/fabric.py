"""Simulated processes and the control connections between them.

A process runs the real `Endpoint` and does with its actions what `kvx.runtime` does; its clock
is off by up to a million seconds. A connection keeps its order, whatever else befalls it, except
that what it has delivered may come once more.
"""

from __future__ import annotations

import random
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import assert_never

from attrs import define, field

from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.errors import LocalProtocolError
from kvx.core.events import (
    Action,
    Cancel,
    Connect,
    Digest,
    Digested,
    Disconnect,
    Event,
    Fence,
    Fenced,
    Forbid,
    Forbidden,
    Introduce,
    PeerLost,
    PeerUp,
    Permit,
    Post,
    Received,
    Report,
    Send,
)
from kvx.core.messages import Ack, Command, Done, Envelope, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import Access, FenceScope, InstanceInfo, News, Peer
from kvx_conformance.oneside import OneSided, Operation
from kvx_conformance.room import Note, Room
from kvx_conformance.scenarios import Plane
from kvx_conformance.toy import Cache, Pool

HELD_REPLAYS = 6
"""Envelopes of a dead epoch kept per pair of addresses, to be said again to its successor."""


def about(message: Message) -> str:
    """The transfers that a message is of; empty where it is of none."""
    match message:
        case GrantMessage(grant=grant):
            return grant.transfer
        case Renew(transfers=transfers):
            return " ".join(transfers)
        case Done() | Ack() | Revoke() | Stopped():
            return message.transfer
        case Hello() | Command():
            return ""
        case _:
            assert_never(message)


@define(eq=False)
class End:
    """One end of a control connection."""

    process: Process
    number: int
    last: float = 0.0  # when the last envelope sent from here arrives: the order is kept
    frozen_until: float = 0.0  # what is sent from here stands still
    heard_at: float = 0.0  # when the last envelope came here
    gone: bool = False  # this end is closed, or has been told that the other one is


@define(eq=False)
class Wire:
    """A control connection."""

    ends: tuple[End, End]
    dead: bool = False

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]


@define(eq=False)
class Process:
    """One rank of one start of an instance."""

    fabric: Fabric
    info: InstanceInfo
    endpoint: Endpoint
    cache: Cache
    pool: Pool
    report: Callable[[Process, News], None]
    offset: float
    rate: float
    died_at: float | None = None
    vanished: bool = False  # its host is gone: nobody hears a connection close
    stalled_until: float = 0.0
    inbox: deque[Event] = field(factory=deque)
    ends: dict[int, tuple[Wire, End]] = field(factory=dict)
    peers: dict[Peer, Process] = field(factory=dict)
    permits: dict[str, list[Permit]] = field(factory=dict)
    fences: dict[Peer, int] = field(factory=dict)
    ops: dict[int, Operation] = field(factory=dict)
    next_link: int = 1
    timer: float | None = None
    idle_turns: int = 0

    @property
    def alive(self) -> bool:
        return self.died_at is None

    @property
    def name(self) -> str:
        return f"{self.info.peer}@{self.info.epoch % 1000:03d}"

    @property
    def rng(self) -> random.Random:
        return self.fabric.chance("process", self.info.peer)

    def local(self) -> float:
        return self.offset + self.fabric.clock.now * self.rate

    # ------------------------------------------------------------------ running

    def feed(self, event: Event) -> None:
        """Something has happened; a stalled process learns of it when it runs again."""
        if not self.alive:
            return
        if self.fabric.clock.now < self.stalled_until:
            self.inbox.append(event)
        else:
            self._run(event)

    def stall(self, seconds: float) -> None:
        self.stalled_until = max(self.stalled_until, self.fabric.clock.now + seconds)
        self.fabric.clock.at(self.stalled_until, self._resume)

    def _resume(self) -> None:
        if self.fabric.clock.now < self.stalled_until or not self.alive:
            return
        while self.inbox and self.alive:
            self._run(self.inbox.popleft())
        self._tick()

    def _run(self, event: Event) -> None:
        self.fabric.note(self, "<-", event)
        self.idle_turns = 0
        try:
            actions = self.endpoint.handle(event, self.local())
        except LocalProtocolError as error:
            self.fabric.violation(f"{self.name} refused {type(event).__name__}: {error}")
            return
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            self.fabric.violation(f"{self.name} broke at {event!r}: {traceback.format_exc(limit=-3)}")
            return
        self._perform(actions)

    def _tick(self) -> None:
        if not self.alive or self.fabric.clock.now < self.stalled_until:
            return
        self.timer = None
        self.idle_turns += 1
        if self.idle_turns > 2000:
            self.fabric.violation(f"{self.name} spins: its deadline does not move")
            return
        try:
            actions = self.endpoint.expire(self.local())
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            self.fabric.violation(f"{self.name} broke in expire: {traceback.format_exc(limit=-3)}")
            return
        self._perform(actions)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.fabric.note(self, "->", action)
            self._do(action)
        self._arm()

    def _arm(self) -> None:
        deadline = self.endpoint.deadline()
        if deadline is None:
            self.timer = None
            return
        moment = max((deadline - self.offset) / self.rate, self.fabric.clock.now) + self.rng.uniform(1e-4, 1e-3)
        if self.timer is None or moment < self.timer - 1e-3 or self.timer <= self.fabric.clock.now:
            self.timer = moment
            self.fabric.clock.at(moment, lambda: self._tick() if self.timer == moment else None)

    def _do(self, action: Action) -> None:
        match action:
            case Send(link=link, envelope=envelope):
                self.fabric.send(self, link, envelope)
            case Report(news=news):
                self.report(self, news)
            case Connect(address=address):
                self.fabric.connect(self, address)
            case Disconnect(link=link):
                self.fabric.disconnect(self, link)
            case Introduce(info=info):
                self.peers[info.peer] = self.fabric.process(info)
            case Permit(transfer=transfer):
                self.permits.setdefault(transfer, []).append(action)
            case Forbid(transfer=transfer):
                self._forbid(transfer)
            case Fence(peer=peer, generation=generation):
                self._fence(peer, generation)
            case Post():
                self.fabric.transport.post(self, action)
            case Cancel(op_id=op_id):
                self.fabric.transport.cancel(self, op_id)
            case Digest(transfer=transfer, peer=peer):
                digested = Digested(transfer, peer, self.cache.digest(action))
                rng = self.fabric.chance("digests", self.info.peer, transfer)
                if rng.random() < 0.5:
                    self.feed(digested)  # as kvx.runtime does: inside of the loop over the actions
                else:
                    self.fabric.soon(rng, lambda: self.feed(digested))

    def _forbid(self, transfer: str) -> None:
        permitted = self.permits.pop(transfer, None)
        if permitted is None or self.fabric.climate.capabilities.access is Access.GRANT:
            rng = self.fabric.chance("forbids", self.info.peer, transfer)
            self.fabric.soon(rng, lambda: self.feed(Forbidden(transfer)))

    def _fence(self, peer: Peer, generation: int) -> None:
        def act() -> None:
            self.fences[peer] = generation
            self.feed(Fenced(peer, generation))

        if self.fabric.climate.capabilities.fence is FenceScope.PEER:
            self.fabric.soon(self.rng, act)


@define(eq=False)
class Fabric(Room):
    """All processes and what connects them."""

    transport: OneSided = field(init=False)
    listeners: dict[str, Process] = field(factory=dict)
    processes: list[Process] = field(factory=list)
    wires: list[Wire] = field(factory=list)
    said: dict[tuple[str, str], deque[Envelope]] = field(factory=dict)
    lulls: set[str] = field(factory=set)
    """Instances that heard nothing for so long, while something was under way, that they might believe in a cut."""
    duplicates: int = 0

    def __attrs_post_init__(self) -> None:
        self.transport = OneSided(self)

    def note(self, process: Process, arrow: str, what: object) -> None:
        if self.trace:
            self.trace(Note(self.clock.now, process.name, arrow, what))

    def process(self, info: InstanceInfo) -> Process:
        """The process that this description is of, dead or alive."""
        return next(p for p in reversed(self.processes) if p.info.peer == info.peer and p.info.epoch == info.epoch)

    # ----------------------------------------------------------- control channel

    def connect(self, process: Process, address: str) -> None:
        number, process.next_link = process.next_link, process.next_link + 1

        def arrive() -> None:
            if not process.alive:
                return
            target = self.listeners.get(address)
            if target is None or target.vanished or not self._reaches(process, target):
                patience = rng.uniform(0.1, self.climate.limits.handshake_s)
                self.clock.after(patience, lambda: process.feed(PeerLost(number, address, False, "no answer")))
            elif not target.alive:
                process.feed(PeerLost(number, address, True, "connection refused"))
            else:
                accepted, target.next_link = target.next_link, target.next_link + 1
                ends = (
                    End(process, number, heard_at=self.clock.now),
                    End(target, accepted, heard_at=self.clock.now),
                )
                link = Wire(ends)
                self.wires.append(link)
                process.ends[number], target.ends[accepted] = (link, ends[0]), (link, ends[1])
                target.feed(PeerUp(accepted, None))
                process.feed(PeerUp(number, address))

        rng = self.chance("connections", process.info.peer, address)
        self.clock.after(self.delay(rng), arrive)

    def _reaches(self, one: Process, two: Process) -> bool:
        """To open a connection takes both ways."""
        return all(self.held_until(Plane.CONTROL, *way) is None for way in ((one, two), (two, one)))

    def send(self, process: Process, number: int, envelope: Envelope) -> None:
        found = process.ends.get(number)
        if found is None:
            return
        link, end = found
        other = link.other(end)
        if link.dead or not other.process.alive:
            # A connection whose other host has vanished is noticed once its successor answers.
            if self.listeners.get(other.process.info.address, process) is not other.process:
                self.clock.after(self.delay(process.rng), lambda: self._lose(end, "reset by peer"))
            return
        self._remember(process, other.process, envelope)
        data = wire.encode(envelope)
        rng = self.chance("control", process.info.peer, other.process.info.peer, about(envelope.message))
        moment, sent_at = self._next(end, rng), self.clock.now
        self.clock.at(moment, lambda: self._arrive(link, end, data, sent_at))

    def _next(self, end: End, rng: random.Random) -> float:
        """When what is sent from this end now arrives, in its order."""
        end.last = max(end.last + 1e-6, self.clock.now + self.delay(rng), end.frozen_until)
        return end.last

    def _arrive(self, link: Wire, sender: End, data: bytes, sent_at: float) -> None:
        receiver = link.other(sender)
        if link.dead or receiver.gone:
            return
        if self.clock.now < sender.frozen_until:
            sender.last = max(sender.last + 1e-6, sender.frozen_until)
            self.clock.at(sender.last, lambda: self._arrive(link, sender, data, sent_at))
            return
        self._note_lull(receiver, sender, sent_at)
        envelope = wire.decode(data)
        receiver.process.feed(Received(receiver.number, envelope))
        if self.climate.duplicates:
            self._duplicate(link, sender, envelope)

    def _note_lull(self, receiver: End, sender: End, sent_at: float) -> None:
        """A network that holds something for about `lost_s` has cut, whatever it does with it in the end."""
        limits, now = self.climate.limits, self.clock.now
        silence, receiver.heard_at = now - receiver.heard_at, now
        if silence >= 0.8 * limits.lost_s and now - sent_at >= limits.lost_s - 2 * limits.keepalive_s:
            self.lulls |= {receiver.process.info.instance, sender.process.info.instance}

    def _duplicate(self, link: Wire, sender: End, envelope: Envelope) -> None:
        """The same envelope comes once more, at once or after others of this connection."""
        receiver = link.other(sender)
        peers = sender.process.info.peer, receiver.process.info.peer
        rng = self.chance("duplicates", *peers, type(envelope.message).__name__, about(envelope.message))
        if rng.random() >= self.climate.duplicates:
            return

        def again() -> None:
            if not link.dead and not receiver.gone:
                self.duplicates += 1
                receiver.process.feed(Received(receiver.number, envelope))

        later = rng.choice((0.0, rng.expovariate(20.0), rng.expovariate(0.5)))
        if later:
            self.clock.after(later, again)
        else:
            again()

    def disconnect(self, process: Process, number: int) -> None:
        found = process.ends.pop(number, None)
        if found is None:
            return
        link, end = found
        end.gone = True
        other = link.other(end)
        self.clock.at(self._next(end, process.rng), lambda: self._lose(other, "closed by peer"))

    def _lose(self, end: End, detail: str) -> None:
        if end.gone:
            return
        end.gone = True
        link, _ = end.process.ends.pop(end.number)
        link.dead = True
        address = link.other(end).process.info.address if end is link.ends[0] else None
        end.process.feed(PeerLost(end.number, address, False, detail))

    def break_wire(self, link: Wire) -> None:
        """An end that cannot send gives up by itself; the other one is told, as soon as something gets there."""
        link.dead = True
        for end in link.ends:
            told = 0.0 if end.frozen_until > self.clock.now else link.other(end).frozen_until
            moment = max(self.clock.now, told) + self.delay(end.process.rng)
            self.clock.at(moment, lambda end=end: self._lose(end, "connection lost"))  # type: ignore[misc]

    def _remember(self, sender: Process, receiver: Process, envelope: Envelope) -> None:
        key = (sender.info.address, receiver.info.address)
        self.said.setdefault(key, deque(maxlen=HELD_REPLAYS)).append(envelope)

    def replay(self, process: Process) -> int:
        """Say again to this process, on its present connections, what its predecessor was told or a dead peer said.

        Returns how many envelopes acted although an epoch in them is over: none may (R3).
        """
        acted = 0
        for number, (link, end) in list(process.ends.items()):
            other = link.other(end).process
            for envelope in list(self.said.get((other.info.address, process.info.address), ())):
                epochs = envelope.from_epoch, envelope.to_epoch
                stale = epochs[0] != other.info.epoch or epochs[1] not in (0, process.info.epoch)
                if stale and epochs[1] != 0 and process.alive and number in process.ends:
                    before = process.endpoint.snapshot()["counts"], list(process.endpoint.peers.known)
                    process.feed(Received(number, envelope))
                    acted += before != (process.endpoint.snapshot()["counts"], list(process.endpoint.peers.known))
        return acted

    # ------------------------------------------------------------------- faults

    def between(self, one: str, two: str) -> list[Wire]:
        names = {one, two}
        return [w for w in self.wires if not w.dead and {end.process.info.instance for end in w.ends} == names]

    def cut(self, ways: Collection[tuple[str, str]], planes: Collection[Plane], seconds: float) -> list[Wire]:
        """Nothing passes from the first to the second of these instances; returns the connections that stand still."""
        until = self.clock.now + seconds
        self.cuts.update({(*way, plane): until for way in ways for plane in planes})
        if Plane.CONTROL not in planes:
            return []
        links = self.between(*next(iter(ways)))
        for link in links:
            self.freeze(link, ways, until)
        return links

    @staticmethod
    def freeze(link: Wire, ways: Collection[tuple[str, str]], until: float) -> None:
        for end in link.ends:
            if (end.process.info.instance, link.other(end).process.info.instance) in ways:
                end.frozen_until = max(end.frozen_until, until)

    def kill(self, process: Process, *, vanishes: bool) -> None:
        process.died_at, process.vanished = self.clock.now, vanishes
        for link, end in list(process.ends.values()):
            other = link.other(end)
            end.gone = True
            if not vanishes:
                moment = self._next(end, process.rng)
                self.clock.at(moment, lambda other=other: self._lose(other, "reset by peer"))  # type: ignore[misc]
        process.ends.clear()
