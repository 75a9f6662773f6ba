"""What the engine and the peers say, and what comes of it, for one rank.

The front of the core: events go in, actions come out. It checks and dispatches; `lifecycle`
holds the open transfers, `contact` binds them to peers, `peers` knows who is there. Nothing
here reads a clock, touches memory or does I/O: `now` comes with every call.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvx.core import wire
from kvx.core.contact import Contacts
from kvx.core.engine_calls import EngineCalls
from kvx.core.errors import RemoteProtocolError
from kvx.core.events import (
    Abort,
    Action,
    Claim,
    Digested,
    Drain,
    Event,
    Expose,
    Fenced,
    Forbidden,
    OpDone,
    OpFailed,
    PeerLost,
    PeerUp,
    Received,
    Stage,
)
from kvx.core.handshake import Handshakes
from kvx.core.legs import Limits
from kvx.core.lifecycle import Transfers
from kvx.core.machine import State
from kvx.core.messages import Ack, Command, Hello
from kvx.core.model import (
    MAX_TRANSFER_ID,
    Capabilities,
    InstanceInfo,
    Reason,
    Ticket,
)
from kvx.core.peer_messages import PeerMessages
from kvx.core.peers import Fact, Peers

_WITHDRAWN = "withdrawn by its router"


class Endpoint:
    """All transfers of one rank of one instance.

    `capabilities` tells what the transport to a peer can do (None: peer not known yet).
    `entropy(n)` gives n random bytes. `integrity` compares a digest of the moved bytes (R13).
    """

    def __init__(
        self,
        info: InstanceInfo,
        *,
        capabilities: Callable[[InstanceInfo | None], Capabilities],
        entropy: Callable[[int], bytes],
        key: bytes = b"",
        limits: Limits | None = None,
        metadata: dict[str, bytes] | None = None,
        integrity: bool = False,
    ) -> None:
        self.info = info
        self.limits = limits or Limits()
        self._key = key
        self._capabilities = capabilities
        self._out: list[Action] = []
        self.peers = Peers(
            info=info,
            limits=self.limits,
            out=self._out,
            handshakes=Handshakes(info, key, entropy, metadata or {}),
            watched=lambda peer: bool(self._transfers.of_peer.get(peer)),
        )
        self._transfers = Transfers(self.peers, self.limits, self._out, integrity=integrity)
        self._contacts = Contacts(info, self.peers, self._transfers, capabilities)
        self._engine = EngineCalls(info, self._transfers, self._contacts, capabilities)
        self._messages = PeerMessages(self.peers, self._transfers, self._contacts)
        self._drained_at: float | None = None
        self.status: Callable[[], dict[str, object]] = self.snapshot
        """What the command `status` is answered with; a shell that knows more puts its own here."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event. Raises LocalProtocolError if the engine or the transport broke a rule."""
        self._expire(now)
        match event:
            case Expose() | Claim() | Stage() | Abort():
                self._engine.take(event, now)
                self._messages.recognise(event.transfer, now)
            case Drain():
                self._drain(event.grace_s, now)
            case PeerUp():
                self.peers.up(event, now)
            case PeerLost():
                self._heard(self.peers.down(event, now), now)
            case Received(link=link, envelope=envelope):
                match envelope.message:
                    case Hello() as hello:
                        self._heard(self.peers.hello(link, hello, now), now)
                    case Command() as command:
                        self._command(link, command, now)
                    case _:
                        association = self.peers.admit(link, envelope, now)
                        if association:
                            self._messages.take(association, envelope.message, now)
            case OpDone() | OpFailed():
                self._transfers.op_ended(event, now)
            case Forbidden(transfer=transfer):
                self._transfers.forbidden(transfer, now)
            case Fenced():
                self._transfers.fenced(event, now)
            case Digested():
                self._transfers.digested(event, now)
        return self._take()

    def deadline(self) -> float | None:
        """When `expire` has something to do; None while nothing is open."""
        moments = [self._transfers.deadline(), self._messages.deadline(), self.peers.deadline(), self._drained_at]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def busy(self) -> bool:
        """Whether a transfer is open or a word is still owed."""
        return bool(self._transfers.open or self.peers.errands)

    def engaged(self) -> list[str]:
        """The open transfers whose engine has not had its Outcome."""
        return [t.id for t in self._transfers.open.values() if t.engaged and not t.reported]

    def expire(self, now: float) -> list[Action]:
        """Let time pass."""
        self._expire(now)
        return self._take()

    def snapshot(self) -> dict[str, object]:
        """Counters and open transfers: for status pages, tests and invariants."""
        # Other threads ask too, while the runtime's goes on: tables are copied in one step before they are walked.
        opened, known = list(self._transfers.open.values()), list(self.peers.known.items())
        return {
            "open": {t.id: [leg.state.value for leg in t.legs] for t in opened},
            "quarantined": sum(leg.state is State.FENCING for t in opened for leg in t.legs),
            "peers": {str(peer): len(a.links) for peer, a in known},
            "tombstones": len(self._transfers.tombstones),
            "strangers": len(self._messages.waiting),
            "errands": sum(map(len, list(self.peers.errands.values()))),
            "dropped": self.peers.dropped,
            "draining": self._transfers.draining,
            "counts": dict(self._transfers.counts),
        }

    def _take(self) -> list[Action]:
        actions = list(self._out)
        self._out.clear()
        return actions

    def _heard(self, facts: list[Fact], now: float) -> None:
        """What `peers` found out; then the messages that had come before their handshake's end."""
        for link, envelope in self._contacts.facts(facts, now):
            association = self.peers.admit(link, envelope, now)
            if association:
                self._messages.take(association, envelope.message, now)

    def _expire(self, now: float) -> None:
        self._transfers.expire(now)
        self._messages.expire(now)
        if self._drained_at is not None and now >= self._drained_at:
            self._drained_at = None
            for t in list(self._transfers.open.values()):
                self._transfers.fail(t, Reason.DRAINING, "the instance is draining", now)
                self._transfers.settle(t, now)
        self._heard(self.peers.expire(now), now)

    def _drain(self, grace_s: float, now: float) -> None:
        """No new transfers; what is still open after the grace is aborted."""
        self._transfers.draining = True
        self._drained_at = now + grace_s

    def _command(self, link: int, command: Command, now: float) -> None:
        known = self.peers.handshakes.links.get(link)
        if known is None:
            return
        if self.peers.handshakes.command_holds(link, command):
            ok, detail, body = self._obey(command, now)
        else:
            ok, detail, body = False, "the proof does not hold: the shared secrets differ", ""
        reason = None if ok else Reason.OTHER
        self.peers.reply(link, 0, Ack(command.nonce.hex(), ok, reason, detail, body))

    def _obey(self, command: Command, now: float) -> tuple[bool, str, str]:
        match command.verb:
            case "status":
                return True, "", msgspec.json.encode(self.status()).decode()
            case "drain":
                try:
                    grace = max(0.0, float(command.argument or "0"))
                except ValueError:
                    return False, f"{command.argument!r} is not a number of seconds", ""
                self._drain(grace, now)
                return True, f"draining {len(self._transfers.open)} transfers", ""
            case "release":
                return (*self._release(command.argument, now), "")
            case "withdraw":
                return (*self._withdraw(command.argument, now), "")
            case _:
                return False, f"unknown command {command.verb!r}; known are status, drain, release, withdraw", ""

    def _release(self, text: str, now: float) -> tuple[bool, str]:
        """A router gives a ticket back: no reader will come."""
        try:
            ticket = wire.parse_ticket(text)
        except RemoteProtocolError as problem:
            return False, str(problem)
        if not self.ticket_holds(ticket):
            return False, "the ticket is of another secret, instance or start"
        t = self._transfers.open.get(ticket.grant.transfer)
        if t is None or t.failed or t.initiates:
            return False, "the transfer is over or unknown"
        if t.met:
            return False, "a reader has taken the ticket up"
        self._transfers.fail(t, Reason.ABORTED, "released by an operator", now)
        self._transfers.settle(t, now)
        return True, "released"

    def _withdraw(self, transfer: str, now: float) -> tuple[bool, str]:
        """A router takes a push back: its consumer has never had the request, and would not say so.

        The word may overtake this side's engine, which then begins what nobody else will: it is remembered.
        """
        if not 1 <= len(transfer) <= MAX_TRANSFER_ID:
            return False, f"a transfer's id has 1 to {MAX_TRANSFER_ID} characters, not {len(transfer)}"
        t = self._transfers.open.get(transfer)
        if t is None and self._transfers.tombstones.get(transfer) is None:
            known = self._messages.remember(transfer, Reason.ABORTED, _WITHDRAWN, now)
            return known, "it will not begin" if known else "there is no room to remember it"
        if t is None or t.failed or not t.initiates:
            return False, "the transfer is over or another one"
        if any(leg.grant is not None for leg in t.legs):
            return False, "its consumer has granted blocks"
        self._transfers.fail(t, Reason.ABORTED, _WITHDRAWN, now)
        self._transfers.settle(t, now)
        return True, "withdrawn"

    def ticket_holds(self, ticket: Ticket) -> bool:
        """Whether this start of this instance made the ticket."""
        mine = (ticket.grant.owner.instance, ticket.grant.epoch) == (self.info.instance, self.info.epoch)
        return mine and wire.ticket_holds(ticket, self._key)
