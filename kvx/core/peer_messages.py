"""What the peers say: the messages of proven peers, and what each moves or answers (R9)."""

from __future__ import annotations

from kvx.core.contact import Contacts
from kvx.core.errors import LocalProtocolError
from kvx.core.events import Report
from kvx.core.layout import check_blocks
from kvx.core.legs import Leg, Transfer, moved
from kvx.core.lifecycle import Transfers
from kvx.core.machine import Cause, State
from kvx.core.messages import Ack, Command, Done, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import BlockTable, Mode, Offered, Peer, Reason, Side
from kvx.core.peers import Association, Peers
from kvx.core.tombstones import Tombstone


class PeerMessages:
    """The peers' front door: every message has its answer, for unknown and finished transfers too.

    A message for a transfer never heard of is kept for a while: the engine's own call may be
    one step behind (a ticket leaves the scheduler before Expose reaches the rank).
    """

    def __init__(self, peers: Peers, transfers: Transfers, contacts: Contacts) -> None:
        self._peers = peers
        self._transfers = transfers
        self._contacts = contacts
        self.waiting: dict[str, tuple[float, list[tuple[Peer, Message]]]] = {}

    def take(self, association: Association, message: Message, now: float) -> None:
        match message:
            case GrantMessage():
                self._on_grant(association, message, now)
            case Renew():
                for transfer in message.transfers:
                    self._on_renew(association, transfer, now)
                if message.echo:
                    self._peers.send(association.peer, Renew())
            case Done():
                self._on_done(association, message, now)
            case Ack():
                self._on_ack(association, message, now)
            case Revoke():
                self._on_revoke(association, message, now)
            case Stopped():
                self._on_stopped(association, message, now)
            case Hello() | Command():
                raise LocalProtocolError("handled before")

    def _on_grant(self, association: Association, message: GrantMessage, now: float) -> None:
        grant, peer = message.grant, association.peer
        stone = self._transfers.tombstones.get(grant.transfer)
        t = self._transfers.open.get(grant.transfer)
        refusal: tuple[Reason, str] | None = None
        if (grant.owner, grant.epoch, grant.mode) != (peer, association.info.epoch, Mode.PUSH):
            refusal = (Reason.EPOCH, "a grant of another owner, epoch or mode")
        elif stone is not None:
            refusal = (stone.reason or Reason.UNKNOWN_TRANSFER, stone.detail)
        elif t is None and self._transfers.draining:
            refusal = (Reason.DRAINING, "no new transfers")
        elif t is None and (
            self._transfers.tombstones.full(now) or len(self._transfers.open) >= self._transfers.limits.transfers
        ):
            refusal = (Reason.NO_CAPACITY, "too many transfers")
        elif t is not None and not (t.mode is Mode.PUSH and t.initiates and t.instance in (None, peer.instance)):
            refusal = (Reason.UNKNOWN_TRANSFER, "this transfer is another one here")
        elif t is not None and t.failed is not None:
            open_leg = t.leg_of(peer)
            if open_leg is not None and not open_leg.terminal:
                return  # a repeated grant; what its operations still do is told when they are over
            refusal = t.failed
        if refusal is not None:
            # This very grant may come again when there is room: Stopped frees its blocks, so it stays refused.
            known = stone is not None or refusal[0] is not Reason.NO_CAPACITY
            if known or self.remember(grant.transfer, *refusal, now):
                self._peers.send(peer, Stopped(grant.transfer, *refusal))
            return
        if t is None:
            t = self._transfers.create(grant.transfer, Mode.PUSH, Side.INITIATOR, now)
            self._transfers.out.append(Report(Offered(grant)))
        leg = self._contacts.leg_for(t, association, now)
        if leg is not None and leg.grant is None and not leg.terminal:
            problem = self._misfit(t, leg, association, message)
            if problem:
                self._transfers.fail(t, *problem, now)
            else:
                leg.prompt = message.prompt or ""
                self._contacts.granted(t, leg, grant, now)
        self._transfers.settle(t, now)

    def _misfit(
        self, t: Transfer, leg: Leg, association: Association, message: GrantMessage | Done
    ) -> tuple[Reason, str] | None:
        """Both sides must have derived the same legs and the same plan, and the blocks must be in bounds (R6, R10)."""
        own = tuple(sorted(other.peer.rank for other in t.legs if other.peer))
        if tuple(sorted(message.legs)) != own:
            return Reason.LAYOUT, f"legs {own} are expected here, {message.legs} by {association.peer}"
        assert leg.plan is not None
        if message.plan != leg.plan.digest:
            return Reason.LAYOUT, f"plan {leg.plan.digest} here, {message.plan} at {association.peer}"
        if isinstance(message, GrantMessage):
            grant = message.grant
            problem = check_blocks(association.info.layout, grant.first, grant.blocks, grant.tokens)
            return (Reason.BOUNDS, f"the grant: {problem}") if problem else None
        assert t.own is not None
        if len(message.first) != len(t.own.first):
            return Reason.BOUNDS, f"{len(message.first)} groups were moved, {len(t.own.first)} are exposed"
        if t.mode is Mode.PULL:
            assert leg.layout is not None
            nothing = BlockTable(((),) * len(message.first))
            if problem := check_blocks(leg.layout, message.first, nothing, t.tokens):
                return Reason.BOUNDS, f"Done: {problem}"
        part, _ = moved(t, leg, message.first, self._peers.info.layout)
        inside = all(
            low <= first <= low + len(blocks)
            for first, low, blocks in zip(part.first, t.own.first, t.own.blocks.groups, strict=True)
        )
        if not inside or (t.mode is Mode.PUSH and message.first != t.own.first):
            return Reason.BOUNDS, f"blocks from {message.first} on were moved, from {t.own.first} on are exposed"
        return None

    def _on_renew(self, association: Association, transfer: str, now: float) -> None:
        peer, t = association.peer, self._transfers.open.get(transfer)
        if t is None:
            stone = self._transfers.tombstones.get(transfer)
            if stone is None:
                self._keep(peer, transfer, Renew((transfer,)), now + self._transfers.limits.lease_s)
                return
            reason = stone.reason or Reason.UNKNOWN_TRANSFER
            if stone.side is not Side.TARGET:
                self._peers.send(peer, Stopped(transfer, reason, stone.detail))
            if stone.side is not Side.INITIATOR:
                self._peers.send(peer, Revoke(transfer, reason, stone.detail))
        elif t.initiates:
            t.patience_from = now
        else:
            leg = self._contacts.leg_for(t, association, now)
            if leg is None:
                self._peers.send(peer, Revoke(transfer, Reason.UNKNOWN_TRANSFER, "the ticket has another reader"))
            elif leg.terminal:
                self._peers.send(peer, Revoke(transfer, *(t.failed or (Reason.UNKNOWN_TRANSFER, "is over"))))
            else:
                leg.lease_until = now + t.lease_s

    def _on_done(self, association: Association, message: Done, now: float) -> None:
        peer, t = association.peer, self._transfers.open.get(message.transfer)
        if t is None:
            stone = self._transfers.tombstones.get(message.transfer)
            if stone is None:
                self._keep(peer, message.transfer, message, now + self._transfers.limits.grace_s)
            else:
                accepted = (peer, association.info.epoch) in stone.accepted
                self._transfers.ack(
                    peer, message.transfer, None if accepted else (stone.reason or Reason.UNKNOWN_TRANSFER, "")
                )
            return
        leg = None if t.initiates else self._contacts.leg_for(t, association, now)
        if leg is None or t.own is None:
            self._transfers.ack(peer, t.id, (Reason.UNKNOWN_TRANSFER, "the ticket has another reader"))
        elif leg.terminal:
            self._transfers.ack(
                peer, t.id, None if leg.state is State.DONE else t.failed or (Reason.UNKNOWN_TRANSFER, "")
            )
        elif leg.state is State.EXPOSED:
            problem = self._misfit(t, leg, association, message)
            if problem:
                self._transfers.fail(t, *problem, now, leg, Cause.STOPPED)
                self._transfers.ack(peer, t.id, problem)
            else:
                self._completed(t, leg, message, now)
        else:
            self._transfers.move(t, leg, Cause.DONE, now)
        self._transfers.settle(t, now)

    def _completed(self, t: Transfer, leg: Leg, message: Done, now: float) -> None:
        """Target, EXPOSED: the peer says that every byte is moved."""
        assert leg.plan is not None
        part, theirs = moved(t, leg, message.first, self._peers.info.layout)
        if t.mode is Mode.PULL:
            leg.nbytes = leg.plan.ranges(t.role, part).nbytes
        if not self._transfers.integrity or leg.empty:
            self._transfers.move(t, leg, Cause.DONE, now)
        elif leg.digest is None:
            leg.digest = message.digest
            self._transfers.digest(t, leg, [leg.plan.units(t.role, part, t.tokens, theirs)])

    def _on_ack(self, association: Association, message: Ack, now: float) -> None:
        t = self._transfers.open.get(message.transfer)
        leg = t.leg_of(association.peer) if t else None
        if t is None or leg is None or leg.state is not State.SETTLING or leg.epoch != association.info.epoch:
            return
        if message.ok:
            self._transfers.move(t, leg, Cause.ACK, now)
        else:
            reason = message.reason or Reason.OTHER
            self._transfers.fail(
                t, reason, f"not acknowledged by {association.peer}: {message.detail}", now, leg, Cause.NACK
            )
        self._transfers.settle(t, now)

    def _on_revoke(self, association: Association, message: Revoke, now: float) -> None:
        peer, t = association.peer, self._transfers.open.get(message.transfer)
        if t is None:
            stone = self._transfers.tombstones.get(message.transfer)
            detail = message.detail or f"revoked by {peer}"
            # An abort that is not known here has overtaken its grant, or this side's engine.
            if stone is not None or self.remember(message.transfer, message.reason, detail, now):
                self._peers.send(peer, Stopped(message.transfer, message.reason))
            return
        if not t.initiates:
            leg = t.leg_of(peer)
            if t.mode is Mode.PUSH and leg is not None and leg.grant is None and not leg.terminal:
                self._transfers.fail(t, message.reason, message.detail or f"refused by {peer}", now)
            self._transfers.settle(t, now)
            return
        leg = self._contacts.leg_for(t, association, now)
        if leg is None:
            self._peers.send(peer, Stopped(message.transfer, message.reason))
        elif leg.terminal:
            self._peers.send(peer, Stopped(message.transfer, *(t.failed or (message.reason, ""))))
        else:
            self._transfers.fail(t, message.reason, message.detail or f"revoked by {peer}", now, leg, Cause.REVOKE)
        self._transfers.settle(t, now)

    def _on_stopped(self, association: Association, message: Stopped, now: float) -> None:
        t = self._transfers.open.get(message.transfer)
        detail = message.detail or f"stopped by {association.peer}"
        if t is None:
            if self._transfers.tombstones.get(message.transfer) is None:
                self.remember(message.transfer, message.reason, detail, now)
            return
        if t.initiates:
            return
        leg = self._contacts.leg_for(t, association, now)
        if leg is not None and not leg.terminal:
            self._transfers.fail(t, message.reason, detail, now, leg, Cause.STOPPED)
        self._transfers.settle(t, now)

    def remember(self, transfer: str, reason: Reason, detail: str, now: float) -> bool:
        """The end of a transfer never heard of. False where there is no room for it: then it must not be answered,
        since Stopped frees blocks for ever; the peer asks again, and waits or quarantines them meanwhile.
        """
        if self._transfers.tombstones.spent(now):
            return False
        stone = Tombstone(transfer, None, reason, detail[:200], frozenset(), False, False)
        self._transfers.tombstones.bury(stone, now)
        return True

    def _keep(self, peer: Peer, transfer: str, message: Message, until: float) -> None:
        """A message for a transfer never heard of waits: the engine's call may be one step behind."""
        held = self.waiting.get(transfer)
        if held is None and len(self.waiting) >= self._transfers.limits.transfers:
            self._peers.dropped += 1
            return
        kept = [*held[1], (peer, message)] if held else [(peer, message)]
        self.waiting[transfer] = (max(until, held[0]) if held else until, kept[-8:])

    def recognise(self, transfer: str, now: float) -> None:
        """The engine's call has come: what waited for it acts now."""
        held = self.waiting.pop(transfer, None)
        for peer, message in held[1] if held else ():
            association = self._peers.known.get(peer)
            if association:
                self.take(association, message, now)

    def _dismiss(self, transfer: str) -> None:
        """Nobody here knows this transfer: say so (R9)."""
        _, messages = self.waiting.pop(transfer)
        for peer, message in messages:
            if isinstance(message, Done):
                self._transfers.ack(peer, transfer, (Reason.UNKNOWN_TRANSFER, "never heard of"))
            else:
                self._peers.send(peer, Revoke(transfer, Reason.UNKNOWN_TRANSFER, "never heard of"))

    def deadline(self) -> float | None:
        return min((until for until, _ in self.waiting.values()), default=None)

    def expire(self, now: float) -> None:
        for transfer, (until, _) in list(self.waiting.items()):
            if now >= until:
                self._dismiss(transfer)
