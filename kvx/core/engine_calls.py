"""What the engine says: Expose, Claim, Stage and Abort, and what each begins or ends."""

from __future__ import annotations

from collections.abc import Callable

from kvx.core.contact import Contacts
from kvx.core.errors import LocalProtocolError
from kvx.core.events import Abort, Claim, Expose, Permit, Report, Stage
from kvx.core.layout import Coverage, check_blocks, plan_leg
from kvx.core.legs import Leg, Transfer
from kvx.core.lifecycle import Transfers
from kvx.core.machine import Cause
from kvx.core.model import (
    Capabilities,
    InstanceInfo,
    Mode,
    Op,
    Outcome,
    Part,
    Reason,
    Released,
    Role,
    Side,
    Stamp,
)
from kvx.core.tombstones import Tombstone


class EngineCalls:
    """The engine's front door. Raises LocalProtocolError where the engine broke a rule."""

    def __init__(
        self,
        info: InstanceInfo,
        transfers: Transfers,
        contacts: Contacts,
        capabilities: Callable[[InstanceInfo | None], Capabilities],
    ) -> None:
        self._info = info
        self._transfers = transfers
        self._contacts = contacts
        self._capabilities = capabilities
        self._own_plan = plan_leg(info.layout, info.layout)

    def take(self, event: Expose | Claim | Stage | Abort, now: float) -> None:
        match event:
            case Expose():
                self._expose(event, now)
            case Claim():
                self._claim(event, now)
            case Stage():
                self._stage(event, now)
            case Abort():
                self._abort(event, now)

    def _expose(self, event: Expose, now: float) -> None:
        known = self._transfers.open.get(event.transfer)
        if known is not None and known.own is not None:
            raise LocalProtocolError(f"transfer {event.transfer} was exposed twice")
        if event.mode is Mode.PUSH and event.address is None and (known is None or known.address is None):
            raise LocalProtocolError(f"push transfer {event.transfer} was exposed without the producer's address")
        t = self._engage(event.transfer, event.mode, Side.TARGET, now)
        if t is None:
            self._late(event.transfer, event.mode, last=True)
            return
        t.own = Part(None, event.first, event.blocks)
        t.tokens, t.lease_s, t.handed, t.finished = event.tokens, event.lease_s, True, True
        t.prompt = event.prompt
        t.address = event.address or t.address
        problem = check_blocks(self._info.layout, event.first, event.blocks, event.tokens)
        if problem or t.failed:
            self._transfers.fail(t, Reason.BOUNDS, problem or "", now)
        elif event.mode is Mode.PULL:
            leg = t.legs[0]
            leg.capabilities = self._capabilities(None)
            leg.lease_until = now + t.lease_s
            ranges = self._own_plan.ranges(t.role, t.own)
            leg.nbytes = ranges.nbytes
            self._transfers.out.append(Permit(t.id, None, Op.READ, ranges, Stamp(t.id, self._info.epoch, 0)))
        elif t.met:
            self._contacts.join_all(t, now)
        self._contacts.contact(t, now)
        self._transfers.settle(t, now)

    def _claim(self, event: Claim, now: float) -> None:
        role = Role.CONSUMER if event.ticket or event.address else Role.PRODUCER
        if event.mode is Mode.PULL and event.ticket is None:
            raise LocalProtocolError(f"pull transfer {event.transfer} was claimed without its ticket")
        side = Side.INITIATOR if event.mode is Mode.PULL or role is Role.PRODUCER else Side.TARGET
        known = self._transfers.open.get(event.transfer)
        again = known is not None and known.engaged
        t = self._engage(event.transfer, event.mode, side, now)
        if t is None:
            self._late(event.transfer, event.mode, last=False, handed=False)
            return
        if not again:
            t.patience_from = now
        self._address(t, event)
        for leg in t.open_legs():
            if leg.grant is not None:
                self._transfers.renew(t, leg, now)
        self._contacts.contact(t, now)
        self._transfers.settle(t, now)

    def _stage(self, event: Stage, now: float) -> None:
        t = self._engage(event.transfer, event.mode, Side.INITIATOR, now)
        if t is None:
            self._late(event.transfer, event.mode, last=event.last)
            return
        if t.finished:
            raise LocalProtocolError(f"transfer {t.id} was staged after its last part")
        self._address(t, event)
        first = not t.handed
        t.handed, t.finished, t.last_part_at = True, event.last, now
        if first:
            t.patience_from = now
        if t.failed is None:
            problem = self._cover(t, event)
            if problem:
                self._transfers.fail(t, Reason.BOUNDS, problem, now)
        if t.failed is None:
            t.parts.append(event.part)
            t.last = event.last
            for leg in t.open_legs():
                self._staged(t, leg, now, first=first)
        self._contacts.contact(t, now)
        self._transfers.settle(t, now)

    def _staged(self, t: Transfer, leg: Leg, now: float, *, first: bool) -> None:
        if t.failed:
            return  # by this very part, on an earlier leg
        self._transfers.move(t, leg, Cause.STAGED, now)
        if first and leg.grant is not None:
            self._transfers.renew(t, leg, now)
        self._transfers.advance(t, leg, now)

    def _cover(self, t: Transfer, event: Stage) -> str | None:
        if t.coverage is None:
            t.coverage, t.tokens = Coverage(self._info.layout, event.tokens), event.tokens
            t.prompt = event.prompt
        if event.tokens != t.tokens:
            return f"{event.tokens} tokens were staged after {t.tokens}"
        try:
            t.coverage.add(event.part)
        except LocalProtocolError as problem:
            return str(problem)
        return None

    def _abort(self, event: Abort, now: float) -> None:
        t = self._transfers.open.get(event.transfer)
        if t is not None:
            t.finished = True
            self._address(t, event)
            unmet = not t.met
            self._transfers.fail(t, event.reason, event.detail or "aborted by its engine", now)
            if unmet:
                self._contacts.owe(t.id, t.mode, t.side, event.reason, event.detail, t.address, now)
            self._transfers.settle(t, now)
            return
        stone = self._transfers.tombstones.get(event.transfer)
        if stone is not None:
            if stone.owed:  # parts were handed over, the last one will not come
                self._transfers.out.append(Report(Released(event.transfer)))
            self._transfers.tombstones.settle(event.transfer, reported=stone.reported, owed=False)
            return
        self._transfers.tombstones.bury(
            Tombstone(event.transfer, None, event.reason, event.detail, frozenset(), True, False), now
        )
        if event.ticket:
            address = event.ticket.grant.address
            self._contacts.owe(event.transfer, Mode.PULL, Side.INITIATOR, event.reason, event.detail, address, now)
        elif event.address:
            self._contacts.owe(event.transfer, Mode.PUSH, Side.TARGET, event.reason, event.detail, event.address, now)

    def _engage(self, transfer: str, mode: Mode, side: Side, now: float) -> Transfer | None:
        """The open transfer that this engine call belongs to; None where it has ended or may not begin."""
        t = self._transfers.open.get(transfer)
        if t is None:
            if self._transfers.tombstones.get(transfer):
                return None
            if self._transfers.draining or len(self._transfers.open) >= self._transfers.limits.transfers:
                reason = Reason.NO_CAPACITY if not self._transfers.draining else Reason.DRAINING
                self._transfers.tombstones.bury(
                    Tombstone(transfer, side, reason, "no new transfers", frozenset(), False, False), now
                )
                return None
            t = self._transfers.create(transfer, mode, side, now)
        if (t.mode, t.side) != (mode, side) and not t.engaged:
            # A peer's grant has taken this id for something else: the engine is owed an Outcome all the same.
            self._transfers.fail(t, Reason.UNKNOWN_TRANSFER, "a peer means another transfer by this id", now)
            self._transfers.settle(t, now)
            return None
        if (t.mode, t.side) != (mode, side):
            raise LocalProtocolError(f"transfer {transfer} is a {t.mode.value} on the {t.side.value}'s side here")
        if not t.engaged:
            t.engaged = True
            self._transfers.count("started")
        return t

    def _late(self, transfer: str, mode: Mode, *, last: bool, handed: bool = True) -> None:
        """An engine call for a transfer that has ended: the Outcome if still owed, Released for the last blocks."""
        stone = self._transfers.tombstones.get(transfer)
        assert stone is not None
        if not stone.reported:
            reason = stone.reason or Reason.UNKNOWN_TRANSFER
            self._transfers.count("started")
            self._transfers.report(Outcome(transfer, False, reason, stone.detail, mode))
        if handed and last:
            self._transfers.out.append(Report(Released(transfer)))
        self._transfers.tombstones.settle(transfer, reported=True, owed=handed and not last)

    @staticmethod
    def _address(t: Transfer, event: Claim | Stage | Abort) -> None:
        ticket = event.ticket
        if ticket is not None and t.ticket is None:
            t.ticket, t.address, t.epoch = ticket, ticket.grant.address, ticket.grant.epoch
            t.lease_s, t.instance = ticket.grant.lease_s, ticket.grant.owner.instance
        if not isinstance(event, Stage) and event.address is not None and t.address is None:
            t.address = event.address
