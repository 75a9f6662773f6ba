"""First contact, reconnects and losses: how a transfer finds the ranks that take part in it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve
from msgspec import UNSET

from kvx.core.errors import LayoutMismatch
from kvx.core.events import Permit
from kvx.core.layout import LegPlan, Pair, check_blocks, pairs, plan_leg
from kvx.core.legs import Leg, Transfer
from kvx.core.lifecycle import Transfers
from kvx.core.machine import Cause, State
from kvx.core.messages import Envelope, GrantMessage, Revoke, Stopped
from kvx.core.model import ROLE, Capabilities, Grant, InstanceInfo, Layout, Mode, Op, Peer, Reason, Role, Side, Stamp
from kvx.core.peers import Association, Errand, Fact, Gone, Met, Peers, Unreachable


class Contacts:
    """Binds transfers to proven peers: legs, plans, grants sent and tickets taken up."""

    def __init__(
        self,
        info: InstanceInfo,
        peers: Peers,
        transfers: Transfers,
        capabilities: Callable[[InstanceInfo], Capabilities],
    ) -> None:
        self._info = info
        self._peers = peers
        self._transfers = transfers
        self._capabilities = capabilities
        self._pairs: dict[tuple[str, int, Role], tuple[Pair, ...]] = {}
        self._plans: dict[tuple[Peer, int, Role], LegPlan] = {}

    def contact(self, t: Transfer, now: float) -> None:
        """Dial the first contact if this side has to; meet it at once where it is known."""
        if t.met or t.failed or t.address is None:
            return
        association = self._peers.reach(t.address, now, epoch=t.epoch)
        if association:
            self.meet(t, association, now)

    def meet(self, t: Transfer, association: Association, now: float) -> None:
        """The peer's layout is known: the legs are known."""
        info = association.info
        if t.ticket is not None and (info.instance, info.epoch) != (t.instance, t.epoch):
            self._transfers.fail(t, Reason.EPOCH, f"the ticket is of another start of {t.instance}", now)
            return
        try:
            self._bind(t, association)
        except LayoutMismatch as mismatch:
            self._transfers.fail(t, Reason.LAYOUT, str(mismatch), now)
            return
        for leg in t.open_legs():
            assert leg.peer is not None
            leg.address = info.address if leg.peer == info.peer else info.addresses[leg.peer.rank]
        self.join_all(t, now)

    def _bind(self, t: Transfer, association: Association) -> None:
        """Fix the instance and epoch that take part, and with them the legs. Raises LayoutMismatch."""
        info = association.info
        t.meet(info.instance, info.epoch, self._ranks(t.role, info))
        for leg in t.legs:
            assert leg.peer is not None
            self._transfers.of_peer.setdefault(leg.peer, {})[t.id] = None

    def _in_order(self, role: Role, peer: Layout) -> tuple[Layout, Layout]:
        return (self._info.layout, peer) if role is Role.PRODUCER else (peer, self._info.layout)

    def _legs(self, role: Role, info: InstanceInfo) -> tuple[Pair, ...]:
        """All legs between the two instances, this side in `role`. Raises LayoutMismatch."""
        key = (info.instance, info.epoch, role)
        if key not in self._pairs:
            self._pairs[key] = pairs(*self._in_order(role, info.layout))
        return self._pairs[key]

    def _ranks(self, role: Role, info: InstanceInfo) -> list[tuple[int, bool]]:
        """(peer rank, shares no data) of the legs of this rank."""
        mine, legs = self._info.rank, self._legs(role, info)
        if role is Role.PRODUCER:
            return [(pair.consumer, pair.empty) for pair in legs if pair.producer == mine]
        return [(pair.producer, pair.empty) for pair in legs if pair.consumer == mine]

    def _legs_at(self, t: Transfer, association: Association) -> tuple[int, ...]:
        """The ranks of this instance that the peer has to hear from."""
        rank, legs = association.info.rank, self._legs(t.role, association.info)
        if t.role is Role.CONSUMER:
            return tuple(pair.consumer for pair in legs if pair.producer == rank)
        return tuple(pair.producer for pair in legs if pair.consumer == rank)

    def _plan(self, t: Transfer, leg: Leg, association: Association) -> None:
        info = association.info
        key = (info.peer, info.epoch, t.role)
        if key not in self._plans:
            for old in [plan for plan in self._plans if plan[0] == info.peer and plan[1] != info.epoch]:
                del self._plans[old]  # of an earlier start of this peer
            self._plans[key] = plan_leg(*self._in_order(t.role, info.layout))
        leg.plan, leg.layout = self._plans[key], info.layout
        leg.capabilities, leg.heard = self._capabilities(info), self._legs_at(t, association)

    def leg_for(self, t: Transfer, association: Association, now: float) -> Leg | None:
        """The leg of a passive side at the first word of a peer; None: this peer does not take part.

        The first accepted word binds the transfer to that instance and epoch (R9).
        """
        if not t.met:
            if t.instance not in (None, association.peer.instance):
                return None
            try:
                self._bind(t, association)
            except LayoutMismatch as mismatch:
                if t.mode is Mode.PUSH:
                    self._transfers.fail(t, Reason.LAYOUT, str(mismatch), now)
                return None
        if (t.instance, t.epoch) != (association.peer.instance, association.info.epoch):
            return None
        leg = t.leg_of(association.peer)
        if leg is not None and leg.plan is None and not leg.terminal:
            try:
                self._plan(t, leg, association)
            except LayoutMismatch as mismatch:
                self._transfers.fail(t, Reason.LAYOUT, str(mismatch), now)
        return leg

    # -------------------------------------------------- joining a connected peer

    def join_all(self, t: Transfer, now: float) -> None:
        """Go on with every leg whose peer is connected, and dial the others."""
        for leg in t.open_legs():
            assert leg.peer is not None
            known = self._peers.known.get(leg.peer)
            if known is not None and known.link is not None and known.info.epoch == t.epoch:
                self.join(t, leg, now)
            elif leg.address:
                self._peers.dial(leg.address, now)

    def join(self, t: Transfer, leg: Leg, now: float) -> None:
        """The peer of this leg is connected: the active side goes on."""
        if t.failed:
            return  # by what came of an earlier leg
        assert leg.peer is not None
        association = self._peers.known[leg.peer]
        if leg.plan is None:
            try:
                self._plan(t, leg, association)
            except LayoutMismatch as mismatch:
                self._transfers.fail(t, Reason.LAYOUT, str(mismatch), now)
                return
        if t.mode is Mode.PULL and t.initiates and leg.grant is None and t.ticket is not None:
            grant = t.ticket.grant
            problem = check_blocks(association.info.layout, grant.first, grant.blocks, grant.tokens)
            if problem:
                self._transfers.fail(t, Reason.BOUNDS, f"the ticket: {problem}", now)
                return
            self.granted(t, leg, grant, now)
        elif t.mode is Mode.PUSH and not t.initiates and leg.grant is None:
            if t.own is None:
                self._transfers.renew(t, leg, now)
            else:
                self._grant(t, leg, association, now)

    def granted(self, t: Transfer, leg: Leg, grant: Grant, now: float) -> None:
        leg.grant, leg.lease_until = grant, now + grant.lease_s
        self._transfers.move(t, leg, Cause.GRANT, now)
        if t.mode is Mode.PULL:
            self._transfers.renew(t, leg, now)  # binds this reader; the ticket's lease has been running
        else:
            leg.renew_at = now + grant.lease_s / 3
        self._transfers.advance(t, leg, now)

    def _grant(self, t: Transfer, leg: Leg, association: Association, now: float) -> None:
        """Push target: permit first, then hand over the grant (control and data have no order)."""
        assert leg.plan is not None and t.own is not None
        ranges = leg.plan.ranges(t.role, t.own)
        generation = association.generation
        leg.grant = Grant(
            transfer=t.id,
            owner=self._info.peer,
            epoch=self._info.epoch,
            generation=generation,
            mode=t.mode,
            first=t.own.first,
            blocks=t.own.blocks,
            tokens=t.tokens,
            lease_s=t.lease_s,
            address=self._info.address,
        )
        leg.nbytes, leg.lease_until, leg.renew_at = ranges.nbytes, now + t.lease_s, None
        stamp = Stamp(t.id, self._info.epoch, generation)
        self._transfers.out.append(Permit(t.id, association.peer, Op.WRITE, ranges, stamp))
        self._send_grant(t, leg, association)

    def _send_grant(self, t: Transfer, leg: Leg, association: Association) -> None:
        assert leg.grant is not None and leg.plan is not None
        message = GrantMessage(leg.grant, self._legs_at(t, association), leg.plan.digest, t.prompt or UNSET)
        self._peers.send(association.peer, message)

    # -------------------------------------------------------------- who is there

    def facts(self, facts: list[Fact], now: float) -> list[tuple[int, Envelope]]:
        """Act on who came and went; give back the messages (link, envelope) that waited for a handshake."""
        parked: list[tuple[int, Envelope]] = []
        for fact in facts:
            match fact:
                case Met():
                    self._met(fact, now)
                    parked += [(fact.link, envelope) for envelope in fact.parked]
                case Unreachable():
                    self._unreachable(fact, now)
                case Gone():
                    self._gone(fact, now)
        return parked

    def _met(self, fact: Met, now: float) -> None:
        association = fact.association
        peer, reached = association.peer, fact.address or association.info.address
        for transfer in list(self._transfers.of_peer.get(peer, ())):
            t = self._transfers.open[transfer]
            leg = t.leg_of(peer)
            if leg is not None and not leg.terminal and leg.epoch == association.info.epoch:
                self._repeat(t, leg, association, now)
                self._transfers.settle(t, now)
        for t in list(self._transfers.open.values()):
            if not t.met and t.failed is None and t.address == reached:
                self.meet(t, association, now)
                self._transfers.settle(t, now)
        for address in dict.fromkeys((reached, association.info.address)):
            for errand in self._peers.errands.pop(address, ()):
                self._run(errand, association, now)

    def _repeat(self, t: Transfer, leg: Leg, association: Association, now: float) -> None:
        """After Hello each side says again what is unanswered; Ack and Stopped are only answers."""
        active = t.address is not None
        match leg.state:
            case State.EXPOSED if t.mode is Mode.PUSH and leg.grant is not None:
                self._send_grant(t, leg, association)
            case State.REVOKING | State.FENCING if not t.initiates:
                self._transfers.revoke(t, leg)
            case State.SETTLING:
                self._transfers.done(t, leg)
            case State.GRANTED | State.MOVING if t.engaged:
                self._transfers.renew(t, leg, now)
                self._transfers.advance(t, leg, now)
            case State.NEW | State.STAGED | State.EXPOSED if active:
                self.join(t, leg, now)
            case _:
                pass

    def _unreachable(self, fact: Unreachable, now: float) -> None:
        for t in list(self._transfers.open.values()):
            if t.failed is not None:
                continue
            if not t.met and t.address == fact.address:
                self._transfers.fail(t, fact.reason, fact.detail, now, t.legs[0], Cause.LOST)
            for leg in t.open_legs():
                if t.met and leg.plan is None and leg.address == fact.address:
                    self._transfers.fail(t, fact.reason, fact.detail, now, leg, Cause.LOST)
            self._transfers.settle(t, now)

    def _gone(self, fact: Gone, now: float) -> None:
        for transfer in list(self._transfers.of_peer.get(fact.peer, ())):
            t = self._transfers.open[transfer]
            leg = t.leg_of(fact.peer)
            if leg is None or leg.terminal:
                continue
            if fact.reborn:
                leg.dead_since = now
            if leg.state is State.FENCING:
                if fact.reborn:  # silence alone changes nothing, and must not put off asking again
                    self._transfers.quarantine(leg, now)
            elif t.mode is Mode.PULL and not t.initiates:
                if fact.reborn:
                    self._transfers.fail(t, fact.reason, fact.detail, now)
            else:
                self._transfers.fail(t, fact.reason, fact.detail, now, leg, Cause.LOST)
            self._transfers.settle(t, now)

    # -------------------------------------------------- words owed to an address

    def owe(
        self, transfer: str, mode: Mode, side: Side, reason: Reason, detail: str, address: str | None, now: float
    ) -> None:
        """Tell whoever is at the address that this transfer is given up, although no leg reaches there."""
        if address is None:
            return
        errand = Errand(transfer, mode, side, reason, detail, now + self._transfers.limits.lease_s, True)
        association = self._peers.reach(address, now)
        if association:
            self._run(errand, association, now)
        else:
            self._peers.owe(address, errand, now)

    def _run(self, errand: Errand, association: Association, now: float) -> None:
        message = (
            Stopped(errand.transfer, errand.reason, errand.detail)
            if errand.side is Side.INITIATOR
            else Revoke(errand.transfer, errand.reason, errand.detail)
        )
        if not errand.spread:
            self._peers.send(association.peer, message)
            return
        role = ROLE[(errand.mode, errand.side)]
        try:
            ranks = [rank for rank, _ in self._ranks(role, association.info)]
        except LayoutMismatch:
            ranks = list(range(len(association.info.addresses)))
        for rank in ranks:
            if rank == association.info.rank:
                self._peers.send(association.peer, message)
            else:
                self._peers.owe(association.info.addresses[rank], evolve(errand, spread=False), now)
