"""Who: connections, proven peers, keepalive, loss, and words owed to addresses.

The endpoint asks `reach` for a peer and `send`s to it; everything that changes who is there
comes back as a fact (`Met`, `Unreachable`, `Gone`). A broken connection alone is not a fact:
the side that dialled dials again, and only another epoch, a refused reconnect or silence for
`lost_s` proves a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, field, frozen

from kvx.core import wire
from kvx.core.events import Action, Connect, Disconnect, Introduce, PeerLost, PeerUp, Send
from kvx.core.handshake import Handshakes
from kvx.core.legs import Limits
from kvx.core.messages import Envelope, Hello, Message, Renew
from kvx.core.model import InstanceInfo, Mode, Peer, Reason, Side

REDIAL_S = 0.2
"""Pause before a broken connection is opened again; short against `lost_s`."""


@define
class Association:
    """What is known of one proven peer; it survives connections, not epochs."""

    info: InstanceInfo
    address: str
    heard_at: float
    links: list[int] = field(factory=list)  # proven connections, oldest first
    opener: bool = False  # this side dialled, so this side dials again
    generation: int = 0
    dial_at: float | None = None
    ping_at: float = 0.0
    watched_from: float | None = None  # legs are open since; None: nothing is open, nothing is watched

    @property
    def peer(self) -> Peer:
        return self.info.peer

    @property
    def link(self) -> int | None:
        return self.links[-1] if self.links else None


@frozen
class Met:
    """A handshake has ended well, for the first time or again after a broken connection."""

    association: Association
    address: str | None
    link: int
    parked: tuple[Envelope, ...]


@frozen
class Unreachable:
    """Nobody can be reached at this address (or who answers is not acceptable)."""

    address: str
    reason: Reason
    detail: str


@frozen
class Gone:
    """A peer is lost; `reborn`: it is proven dead, since another epoch of it has come."""

    peer: Peer
    reason: Reason
    detail: str
    reborn: bool


Fact = Met | Unreachable | Gone


@frozen
class Errand:
    """A word that must still reach an address. `spread`: it goes to all ranks that share data with this one."""

    transfer: str
    mode: Mode
    side: Side
    reason: Reason
    detail: str
    until: float
    spread: bool


@define
class Peers:
    """All peers of one rank. Actions are appended to `out`, which the endpoint empties."""

    info: InstanceInfo
    limits: Limits
    out: list[Action]
    handshakes: Handshakes
    watched: Callable[[Peer], bool]
    """Whether any leg with this peer is open: only then are keepalives sent and losses looked for."""
    known: dict[Peer, Association] = field(factory=dict)
    errands: dict[str, list[Errand]] = field(factory=dict)
    dropped: int = 0
    _at: dict[str, Peer] = field(factory=dict)
    _dials: dict[str, float] = field(factory=dict)  # address -> deadline of the handshake
    _by_link: dict[int, Peer] = field(factory=dict)

    # ------------------------------------------------------------------ asking

    def reach(self, address: str, now: float, *, epoch: int | None = None) -> Association | None:
        """The proven peer at this address if it is connected; else dial (once) and tell later.

        With `epoch`, another epoch of the peer does not count: it may have restarted unseen.
        """
        peer = self._at.get(address)
        association = self.known.get(peer) if peer else None
        if association and association.link is not None and epoch in (None, association.info.epoch):
            return association
        self.dial(address, now)
        return None

    def dial(self, address: str, now: float) -> None:
        if address not in self._dials:
            self._dials[address] = now + self.limits.handshake_s
            self.out.append(Connect(address))

    def send(self, peer: Peer, message: Message) -> bool:
        """False without a connection: what is unanswered is repeated after the next Hello."""
        association = self.known.get(peer)
        if association is None or association.link is None:
            return False
        self._post(association.link, association.info.epoch, message)
        return True

    def reply(self, link: int, to_epoch: int, message: Message) -> None:
        self._post(link, to_epoch, message)

    def sender(self, link: int) -> Association | None:
        peer = self._by_link.get(link)
        return self.known.get(peer) if peer else None

    def owe(self, address: str, errand: Errand, now: float) -> None:
        self.errands.setdefault(address, []).append(errand)
        self.dial(address, now)

    # ------------------------------------------------------- control connections

    def up(self, event: PeerUp, now: float) -> None:
        hello = self.handshakes.opened(event.link, event.address, now)
        if hello:
            self._post(event.link, 0, hello)

    def down(self, event: PeerLost, now: float) -> list[Fact]:
        link = self.handshakes.closed(event.link)
        facts: list[Fact] = []
        if event.address is not None and event.address in self._dials and (link is None or link.info is None):
            del self._dials[event.address]
            facts += self._unreachable(event.address, Reason.PEER_LOST, event.detail or "connection lost", now)
        peer = self._by_link.pop(event.link, None)
        association = self.known.get(peer) if peer else None
        if association:
            association.links.remove(event.link)
            if association.link is None and association.opener and self.watched(association.peer):
                association.dial_at = now + REDIAL_S
        return facts

    def hello(self, number: int, hello: Hello, now: float) -> list[Fact]:
        link = self.handshakes.links.get(number)
        if link is None:
            return []
        answer = self.handshakes.hello(number, hello)
        for reply in answer.replies:
            self._post(number, link.peer_epoch, reply)
        if answer.refused:
            reason, detail = answer.refused
            self.handshakes.closed(number)
            self.out.append(Disconnect(number, detail))
            if link.address is None or link.address not in self._dials:
                return []
            del self._dials[link.address]
            return self._unreachable(link.address, reason, detail, now)
        if answer.introduced is None:
            return []
        self.out.append(Introduce(answer.introduced, answer.metadata, number))
        facts = self._introduce(number, link.address, answer.introduced, now)
        parked, link.parked = tuple(link.parked), []
        return [*facts, Met(self.known[answer.introduced.peer], link.address, number, parked)]

    def admit(self, number: int, envelope: Envelope, now: float) -> Association | None:
        """The sender of a message, if the message may act: proven, and both epochs as they are now (R3)."""
        link = self.handshakes.links.get(number)
        if link is not None and link.info is None:
            if not self.handshakes.park(number, envelope):
                self.dropped += 1
            return None
        association = self.sender(number)
        if association is None or (envelope.from_epoch, envelope.to_epoch) != (association.info.epoch, self.info.epoch):
            self.dropped += 1
            return None
        association.heard_at = now
        return association

    def _introduce(self, number: int, address: str | None, info: InstanceInfo, now: float) -> list[Fact]:
        facts: list[Fact] = []
        peer = info.peer
        association = self.known.get(peer)
        if association and association.info.epoch != info.epoch:
            for old in association.links:
                self._by_link.pop(old, None)
                self.handshakes.closed(old)
                self.out.append(Disconnect(old, "another epoch of this peer has come"))
            association.links.clear()
            facts.append(Gone(peer, Reason.EPOCH, f"{peer} has restarted", reborn=True))
            association.info = info
        elif association is None:
            association = self.known[peer] = Association(info, info.address, now)
        association.info, association.heard_at, association.dial_at = info, now, None
        association.links.append(number)
        association.opener = association.opener or address is not None
        self._by_link[number] = peer
        if address is not None:
            association.address = address
            self._at[address] = peer
            self._dials.pop(address, None)
        return facts

    def _unreachable(self, address: str, reason: Reason, detail: str, now: float) -> list[Fact]:
        facts: list[Fact] = [Unreachable(address, reason, f"{address}: {detail}")]
        self.errands.pop(address, None)
        peer = self._at.get(address)
        association = self.known.get(peer) if peer else None
        if association and association.link is None:
            facts.append(Gone(association.peer, reason, f"{address}: {detail}", reborn=False))
        return facts

    def _post(self, link: int, to_epoch: int, message: Message) -> None:
        self.out.append(Send(link, Envelope(wire.VERSION, self.info.epoch, to_epoch, message)))

    # --------------------------------------------------------------------- time

    def expire(self, now: float) -> list[Fact]:
        facts: list[Fact] = []
        for address, until in list(self._dials.items()):
            if now >= until:
                del self._dials[address]
                facts += self._unreachable(address, Reason.PEER_LOST, "no handshake in time", now)
        for address, errands in list(self.errands.items()):
            kept = [errand for errand in errands if now < errand.until]
            if len(kept) < len(errands):
                self.errands[address] = kept
            if not kept:
                del self.errands[address]
        for association in list(self.known.values()):
            facts += self._watch(association, now)
        return facts

    def _watch(self, association: Association, now: float) -> list[Fact]:
        if not self.watched(association.peer):
            association.watched_from = association.dial_at = None
            return []
        if association.watched_from is None:
            association.watched_from = association.ping_at = now
        if now >= self._silent_until(association):
            association.watched_from = now
            silence = f"no word from {association.peer} for {self.limits.lost_s:g} s"
            return [Gone(association.peer, Reason.PEER_LOST, silence, reborn=False)]
        if association.dial_at is not None and now >= association.dial_at:
            association.dial_at = None
            self.dial(association.address, now)
        if association.link is not None and now >= association.ping_at:
            association.ping_at = now + self.limits.keepalive_s
            self.send(association.peer, Renew(echo=True))
        return []

    def _silent_until(self, association: Association) -> float:
        return max(association.heard_at, association.watched_from or 0.0) + self.limits.lost_s

    def deadline(self) -> float | None:
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterable[float]:
        yield from self._dials.values()
        for errands in self.errands.values():
            yield from (errand.until for errand in errands)
        for association in self.known.values():
            if not self.watched(association.peer):
                continue
            if association.watched_from is None:
                yield 0.0
                continue
            yield self._silent_until(association)
            if association.link is not None:
                yield association.ping_at
            if association.dial_at is not None:
                yield association.dial_at
