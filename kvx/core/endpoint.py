"""What: every transfer of one rank, driven by events and by time.

The one stateful class of the core. It decides with `machine` (which state follows), `layout`
(which bytes), `peers` (who is there) and `tombstones` (what has been), and gives back actions.
It never reads a clock, touches memory or does I/O: `now` comes with every call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec
import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from kvx.core import wire
from kvx.core.errors import LayoutMismatch, LocalProtocolError, RemoteProtocolError
from kvx.core.events import (
    Abort,
    Action,
    Cancel,
    Claim,
    Digest,
    Digested,
    Drain,
    Event,
    Expose,
    Fence,
    Fenced,
    Forbid,
    Forbidden,
    OpDone,
    OpFailed,
    PeerLost,
    PeerUp,
    Permit,
    Post,
    Received,
    Report,
    Stage,
)
from kvx.core.handshake import Handshakes
from kvx.core.layout import Coverage, LegPlan, check, check_blocks, pairs, plan_leg, window
from kvx.core.legs import Leg, Limits, Transfer, provisional
from kvx.core.machine import Cause, State, step
from kvx.core.messages import Ack, Command, Done, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import (
    OP,
    ROLE,
    BlockTable,
    Capabilities,
    Descriptors,
    FenceScope,
    Grant,
    InstanceInfo,
    Layout,
    Mode,
    Offered,
    Op,
    Outcome,
    Part,
    Peer,
    Reason,
    Released,
    Role,
    Side,
    Stamp,
    Ticket,
)
from kvx.core.peers import Association, Errand, Gone, Met, Peers, Unreachable
from kvx.core.tombstones import Tombstone, Tombstones

_FAILING = frozenset({State.DRAINING, State.REVOKING, State.FENCING})
_COMPLETE = frozenset({State.SETTLING, State.DONE})
_MILD = frozenset({Cause.ABORT, Cause.REVOKE, Cause.LEASE, Cause.PATIENCE})
"""Causes that come too late once every leg has moved all its bytes."""


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
        self.integrity = integrity
        self._key = key
        self._capabilities = capabilities
        self._out: list[Action] = []
        self._transfers: dict[str, Transfer] = {}
        self._of_peer: dict[Peer, set[str]] = {}
        self._ops: dict[int, tuple[Transfer, Leg]] = {}
        self._next_op = 1
        self._due: list[tuple[float, str]] = []
        self._strangers: dict[str, tuple[float, list[tuple[Peer, Message]]]] = {}
        self._plans: dict[tuple[Peer, int, Role], LegPlan] = {}
        self._own_plan = plan_leg(info.layout, info.layout)
        self._draining: float | None = None
        self._counts: dict[str, int] = {}
        self._tombstones = Tombstones(
            self.limits.tombstones, keep_s=3 * self.limits.lease_s, owed_s=self.limits.transfer_max_s
        )
        self.peers = Peers(
            info=info,
            limits=self.limits,
            out=self._out,
            handshakes=Handshakes(info, key, entropy, metadata or {}),
            watched=lambda peer: bool(self._of_peer.get(peer)),
        )

    # ------------------------------------------------------------------ the API

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event. Raises LocalProtocolError if the engine or the transport broke a rule."""
        self._expire(now)
        match event:
            case Expose():
                self._expose(event, now)
            case Claim():
                self._claim(event, now)
            case Stage():
                self._stage(event, now)
            case Abort():
                self._abort(event, now)
            case Drain():
                self._draining = now + event.grace_s
            case PeerUp():
                self.peers.up(event, now)
            case PeerLost():
                self._facts(self.peers.down(event, now), now)
            case Received(link=link, envelope=envelope):
                match envelope.message:
                    case Hello() as hello:
                        self._facts(self.peers.hello(link, hello, now), now)
                    case Command() as command:
                        self._command(link, command, now)
                    case _:
                        association = self.peers.admit(link, envelope, now)
                        if association:
                            self._message(association, envelope.message, now)
            case OpDone() | OpFailed():
                self._op_ended(event, now)
            case Forbidden(transfer=transfer):
                self._each_leg(transfer, lambda t, leg: self._forbidden(t, leg, now), now)
            case Fenced():
                self._fenced(event, now)
            case Digested():
                self._digested(event, now)
        return self._take()

    def deadline(self) -> float | None:
        """When `expire` has something to do; None while nothing is open."""
        while self._due and (t := self._transfers.get(self._due[0][1])) and self._due_at(t) > self._due[0][0]:
            _, transfer = heapq.heappop(self._due)
            heapq.heappush(self._due, (self._due_at(t), transfer))
        while self._due and self._due[0][1] not in self._transfers:
            heapq.heappop(self._due)
        moments = [until for until, _ in self._strangers.values()]
        if self._due:
            moments.append(self._due[0][0])
        if self._draining is not None and self._transfers:
            moments.append(self._draining)
        peers = self.peers.deadline()
        if peers is not None:
            moments.append(peers)
        return min(moments, default=None)

    @property
    def busy(self) -> bool:
        """Whether a transfer is open or a word is still owed."""
        return bool(self._transfers or self.peers.errands)

    def expire(self, now: float) -> list[Action]:
        """Let time pass."""
        self._expire(now)
        return self._take()

    def snapshot(self) -> dict[str, object]:
        """Counters and open transfers: for status pages, tests and invariants."""
        return {
            "open": {t.id: [leg.state.value for leg in t.legs] for t in self._transfers.values()},
            "quarantined": sum(leg.state is State.FENCING for t in self._transfers.values() for leg in t.legs),
            "peers": {str(peer): len(a.links) for peer, a in self.peers.known.items()},
            "tombstones": len(self._tombstones),
            "strangers": len(self._strangers),
            "errands": sum(map(len, self.peers.errands.values())),
            "dropped": self.peers.dropped,
            "draining": self._draining is not None,
            "counts": dict(self._counts),
        }

    def _take(self) -> list[Action]:
        actions = list(self._out)
        self._out.clear()
        return actions

    # ------------------------------------------------------------ engine's events

    def _expose(self, event: Expose, now: float) -> None:
        t = self._engage(event.transfer, event.mode, Side.TARGET, now)
        if t is None:
            self._late(event.transfer, event.mode, last=True)
            return
        if t.own is not None:
            raise LocalProtocolError(f"transfer {t.id} was exposed twice")
        if event.mode is Mode.PUSH and event.address is None and t.address is None:
            raise LocalProtocolError(f"push transfer {t.id} was exposed without the producer's address")
        t.own = Part(None, event.first, event.blocks)
        t.tokens, t.lease_s, t.handed, t.finished = event.tokens, event.lease_s, True, True
        t.address = event.address or t.address
        problem = check_blocks(self.info.layout, event.first, event.blocks, event.tokens)
        if problem or t.failed:
            self._fail(t, Reason.BOUNDS, problem or "", now)
        elif event.mode is Mode.PULL:
            leg = t.legs[0]
            leg.capabilities = self._capabilities(None)
            leg.lease_until = now + t.lease_s
            ranges = self._own_plan.ranges(t.role, t.own)
            leg.nbytes = ranges.nbytes
            self._out.append(Permit(t.id, None, Op.READ, ranges, Stamp(t.id, self.info.epoch, 0)))
        elif t.met:
            for leg in t.open_legs():
                self._join(t, leg, now)
        self._contact(t, now)
        self._settle(t, now)
        self._recognise(t.id, now)

    def _claim(self, event: Claim, now: float) -> None:
        role = Role.CONSUMER if event.ticket or event.address else Role.PRODUCER
        if event.mode is Mode.PULL and event.ticket is None:
            raise LocalProtocolError(f"pull transfer {event.transfer} was claimed without its ticket")
        side = Side.INITIATOR if event.mode is Mode.PULL or role is Role.PRODUCER else Side.TARGET
        t = self._engage(event.transfer, event.mode, side, now)
        if t is None:
            self._late(event.transfer, event.mode, last=False, handed=False)
            return
        t.patience_from = now
        self._address(t, event)
        for leg in t.open_legs():
            if leg.grant is not None:
                self._renew(t, leg, now)
        self._contact(t, now)
        self._settle(t, now)
        self._recognise(t.id, now)

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
                self._fail(t, Reason.BOUNDS, problem, now)
        if t.failed is None:
            t.parts.append(event.part)
            t.last = event.last
            for leg in t.open_legs():
                self._move(t, leg, Cause.STAGED, now)
                if first and leg.grant is not None:
                    self._renew(t, leg, now)
                self._advance(t, leg, now)
        self._contact(t, now)
        self._settle(t, now)
        self._recognise(t.id, now)

    def _cover(self, t: Transfer, event: Stage) -> str | None:
        if t.coverage is None:
            t.coverage, t.tokens = Coverage(self.info.layout, event.tokens), event.tokens
        if event.tokens != t.tokens:
            return f"{event.tokens} tokens were staged after {t.tokens}"
        try:
            t.coverage.add(event.part)
        except LocalProtocolError as problem:
            return str(problem)
        return None

    def _abort(self, event: Abort, now: float) -> None:
        t = self._transfers.get(event.transfer)
        if t is not None:
            t.finished = True
            self._address(t, event)
            unmet = not t.met
            self._fail(t, event.reason, event.detail or "aborted by its engine", now)
            if unmet:
                self._owe(t.id, t.mode, t.side, event.reason, event.detail, t.address, now)
            self._settle(t, now)
            return
        stone = self._tombstones.get(event.transfer)
        if stone is not None:
            self._tombstones.settle(event.transfer, reported=stone.reported, owed=False)
            return
        self._bury(Tombstone(event.transfer, None, event.reason, event.detail, frozenset(), True, False), now)
        if event.ticket:
            address = event.ticket.grant.address
            self._owe(event.transfer, Mode.PULL, Side.INITIATOR, event.reason, event.detail, address, now)
        elif event.address:
            self._owe(event.transfer, Mode.PUSH, Side.TARGET, event.reason, event.detail, event.address, now)

    def _engage(self, transfer: str, mode: Mode, side: Side, now: float) -> Transfer | None:
        """The open transfer that this engine call belongs to; None where it has ended or may not begin."""
        t = self._transfers.get(transfer)
        if t is None:
            if self._tombstones.get(transfer):
                return None
            if self._draining is not None or len(self._transfers) >= self.limits.transfers:
                reason = Reason.NO_CAPACITY if self._draining is None else Reason.DRAINING
                self._bury(Tombstone(transfer, side, reason, "no new transfers", frozenset(), False, False), now)
                return None
            t = self._create(transfer, mode, side, now)
        if (t.mode, t.side) != (mode, side):
            raise LocalProtocolError(f"transfer {transfer} is a {t.mode.value} on the {t.side.value}'s side here")
        if not t.engaged:
            t.engaged = True
            self._count("started")
        return t

    def _late(self, transfer: str, mode: Mode, *, last: bool, handed: bool = True) -> None:
        """An engine call for a transfer that has ended: the Outcome if still owed, Released for the last blocks."""
        stone = self._tombstones.get(transfer)
        assert stone is not None
        if not stone.reported:
            reason = stone.reason or Reason.UNKNOWN_TRANSFER
            self._count("started")
            self._report(Outcome(transfer, False, reason, stone.detail, mode))
        if handed and last:
            self._out.append(Report(Released(transfer)))
        self._tombstones.settle(transfer, reported=True, owed=handed and not last)

    @staticmethod
    def _address(t: Transfer, event: Claim | Stage | Abort) -> None:
        ticket = event.ticket
        if ticket is not None and t.ticket is None:
            t.ticket, t.address, t.epoch = ticket, ticket.grant.address, ticket.grant.epoch
            t.lease_s, t.instance = ticket.grant.lease_s, ticket.grant.owner.instance
        if not isinstance(event, Stage) and event.address is not None and t.address is None:
            t.address = event.address

    # --------------------------------------------------------------- first contact

    def _create(self, transfer: str, mode: Mode, side: Side, now: float) -> Transfer:
        role = ROLE[(mode, side)]
        t = Transfer(transfer, mode, role, now, [provisional(side is Side.INITIATOR)], patience_from=now)
        t.lease_s = self.limits.lease_s
        self._transfers[transfer] = t
        heapq.heappush(self._due, (now, transfer))
        return t

    def _contact(self, t: Transfer, now: float) -> None:
        """Dial the first contact if this side has to; meet it at once where it is known."""
        if t.met or t.failed or t.address is None:
            return
        association = self.peers.reach(t.address, now, epoch=t.epoch)
        if association:
            self._meet(t, association, now)

    def _meet(self, t: Transfer, association: Association, now: float) -> None:
        """The peer's layout is known: the legs are known."""
        info = association.info
        if t.ticket is not None and (info.instance, info.epoch) != (t.instance, t.epoch):
            self._fail(t, Reason.EPOCH, f"the ticket is of another start of {t.instance}", now)
            return
        try:
            self._bind(t, association)
        except LayoutMismatch as mismatch:
            self._fail(t, Reason.LAYOUT, str(mismatch), now)
            return
        for leg in t.open_legs():
            assert leg.peer is not None
            leg.address = info.address if leg.peer == info.peer else info.addresses[leg.peer.rank]
            known = self.peers.known.get(leg.peer)
            if known is not None and known.link is not None and known.info.epoch == t.epoch:
                self._join(t, leg, now)
            elif leg.peer != info.peer:
                self.peers.dial(leg.address, now)

    def _bind(self, t: Transfer, association: Association) -> None:
        """Fix the instance and epoch that take part, and with them the legs. Raises LayoutMismatch."""
        info = association.info
        producer, consumer = self._in_order(t.role, info.layout)
        check(producer, consumer)
        t.meet(info.instance, info.epoch, self._ranks(t.role, producer, consumer))
        for leg in t.legs:
            assert leg.peer is not None
            self._of_peer.setdefault(leg.peer, set()).add(t.id)

    def _in_order(self, role: Role, peer: Layout) -> tuple[Layout, Layout]:
        return (self.info.layout, peer) if role is Role.PRODUCER else (peer, self.info.layout)

    def _ranks(self, role: Role, producer: Layout, consumer: Layout) -> list[tuple[int, bool]]:
        """(peer rank, shares no data) of the legs of this rank."""
        mine = self.info.rank
        if role is Role.PRODUCER:
            return [(pair.consumer, pair.empty) for pair in pairs(producer, consumer) if pair.producer == mine]
        return [(pair.producer, pair.empty) for pair in pairs(producer, consumer) if pair.consumer == mine]

    def _legs_at(self, t: Transfer, association: Association) -> tuple[int, ...]:
        """The ranks of this instance that the peer has to hear from."""
        producer, consumer = self._in_order(t.role, association.info.layout)
        rank = association.info.rank
        if t.role is Role.CONSUMER:
            return tuple(pair.consumer for pair in pairs(producer, consumer) if pair.producer == rank)
        return tuple(pair.producer for pair in pairs(producer, consumer) if pair.consumer == rank)

    def _plan(self, t: Transfer, leg: Leg, association: Association) -> None:
        key = (association.peer, association.info.epoch, t.role)
        if key not in self._plans:
            self._plans[key] = plan_leg(*self._in_order(t.role, association.info.layout))
        leg.plan, leg.capabilities = self._plans[key], self._capabilities(association.info)

    def _join(self, t: Transfer, leg: Leg, now: float) -> None:
        """The peer of this leg is connected: the active side goes on."""
        assert leg.peer is not None
        association = self.peers.known[leg.peer]
        if leg.plan is None:
            try:
                self._plan(t, leg, association)
            except LayoutMismatch as mismatch:
                self._fail(t, Reason.LAYOUT, str(mismatch), now)
                return
        if t.mode is Mode.PULL and t.initiates and leg.grant is None and t.ticket is not None:
            grant = t.ticket.grant
            problem = check_blocks(association.info.layout, grant.first, grant.blocks, grant.tokens)
            if problem:
                self._fail(t, Reason.BOUNDS, f"the ticket: {problem}", now)
                return
            self._granted(t, leg, grant, now)
        elif t.mode is Mode.PUSH and not t.initiates and leg.grant is None:
            if t.own is None:
                self._renew(t, leg, now)
            else:
                self._grant(t, leg, association, now)

    def _granted(self, t: Transfer, leg: Leg, grant: Grant, now: float) -> None:
        leg.grant, leg.lease_until = grant, now + grant.lease_s
        self._move(t, leg, Cause.GRANT, now)
        if t.engaged and not leg.terminal:
            self._renew(t, leg, now)
        self._advance(t, leg, now)

    def _grant(self, t: Transfer, leg: Leg, association: Association, now: float) -> None:
        """Push target: permit first, then hand over the grant (control and data have no order)."""
        assert leg.plan is not None and t.own is not None
        ranges = leg.plan.ranges(t.role, t.own)
        generation = association.generation
        leg.grant = Grant(
            transfer=t.id,
            owner=self.info.peer,
            epoch=self.info.epoch,
            generation=generation,
            mode=t.mode,
            first=t.own.first,
            blocks=t.own.blocks,
            tokens=t.tokens,
            lease_s=t.lease_s,
            address=self.info.address,
        )
        leg.nbytes, leg.lease_until, leg.renew_at = ranges.nbytes, now + t.lease_s, None
        stamp = Stamp(t.id, self.info.epoch, generation)
        self._out.append(Permit(t.id, association.peer, Op.WRITE, ranges, stamp))
        self._send_grant(t, leg, association)

    def _send_grant(self, t: Transfer, leg: Leg, association: Association) -> None:
        assert leg.grant is not None and leg.plan is not None
        message = GrantMessage(leg.grant, self._legs_at(t, association), leg.plan.digest)
        self.peers.send(association.peer, message)

    # ---------------------------------------------------------------- moving bytes

    def _advance(self, t: Transfer, leg: Leg, now: float) -> None:
        """Post every staged part that has not been posted; settle when nothing is left."""
        if leg.state is not State.MOVING or leg.grant is None or leg.plan is None:
            return
        if t.last:
            problem = self._incomplete(t, leg)
            if problem:
                self._fail(t, Reason.BOUNDS, problem, now)
                return
        while leg.next_part < len(t.parts):
            if leg.lease_until is not None and leg.lease_until - now < 0.2 * leg.grant.lease_s:
                return
            part = t.parts[leg.next_part]
            leg.next_part += 1
            if not leg.empty:
                self._post(leg, t, *t.move(leg, part), now)
        self._quiet(t, leg, now)

    def _post(self, leg: Leg, t: Transfer, local: Descriptors, remote: Descriptors, now: float) -> None:
        assert leg.grant is not None and leg.peer is not None and leg.capabilities is not None
        stamp = Stamp(t.id, leg.grant.epoch, leg.grant.generation)
        most = leg.capabilities.max_descriptors
        for start in range(0, len(local), most):
            cut = slice(start, start + most)
            op_id, self._next_op = self._next_op, self._next_op + 1
            leg.ops[op_id] = now + self.limits.op_timeout_s
            self._ops[op_id] = (t, leg)
            mine = Descriptors(local.region[cut], local.offset[cut], local.length[cut])
            theirs = Descriptors(remote.region[cut], remote.offset[cut], remote.length[cut])
            self._out.append(Post(op_id, leg.peer, OP[t.mode], mine, theirs, stamp))

    def _incomplete(self, t: Transfer, leg: Leg) -> str | None:
        """What is missing now that the last part is there (counts, positions, tokens: R10)."""
        assert leg.grant is not None and leg.peer is not None and t.coverage is not None
        if t.tokens != leg.grant.tokens:
            return f"the prompt has {t.tokens} tokens here and {leg.grant.tokens} at the peer"
        covered = t.coverage.first()
        peer = self.peers.known[leg.peer].info.layout
        if t.mode is Mode.PUSH:
            if leg.grant.blocks.empty:
                return None
            need = window(leg.grant.first, peer, self.info.layout, t.tokens)
            missing = any(
                have > wanted and blocks
                for have, wanted, blocks in zip(covered, need, leg.grant.blocks.groups, strict=True)
            )
            return f"blocks from {need} on are wanted, only those from {covered} on were staged" if missing else None
        groups = range(len(covered))
        staged = [min((part.first[g] for part in t.parts if part.blocks.groups[g]), default=covered[g]) for g in groups]
        if any(covered[g] > staged[g] for g in groups):
            return f"blocks from {tuple(staged)} on were staged with gaps before {covered}"
        theirs = self._first_there(t, leg)
        if any(leg.grant.first[g] > theirs[g] for g in groups if any(part.blocks.groups[g] for part in t.parts)):
            return f"blocks from {theirs} on are wanted, only those from {leg.grant.first} on are granted"
        return None

    def _first_there(self, t: Transfer, leg: Leg) -> tuple[int, ...]:
        """`Done.first`: from where on this side has moved, in the owner's blocks."""
        assert leg.grant is not None and leg.peer is not None and t.coverage is not None
        if t.mode is Mode.PUSH:
            return leg.grant.first
        return window(t.coverage.first(), self.info.layout, self.peers.known[leg.peer].info.layout, t.tokens)

    def _quiet(self, t: Transfer, leg: Leg, now: float) -> None:
        if leg.state is not State.MOVING or leg.ops or not t.last or leg.next_part < len(t.parts):
            return
        if self.integrity and leg.digest is None and not leg.empty:
            self._ask_digest(t, leg)
            return
        self._move(t, leg, Cause.QUIET, now)

    def _ask_digest(self, t: Transfer, leg: Leg) -> None:
        """Initiator: sum up what was moved before Done says so (R13)."""
        assert leg.plan is not None
        leg.digest = ""
        owner = t.owner_part(leg)
        self._digest(t, leg, [leg.plan.units(t.role, part, t.tokens, owner) for part in t.parts])

    def _digest(self, t: Transfer, leg: Leg, units: list[tuple[Descriptors, NDArray[np.int64]]]) -> None:
        assert leg.peer is not None
        self._out.append(Digest(t.id, leg.peer, tuple(units)))

    def _digested(self, event: Digested, now: float) -> None:
        t = self._transfers.get(event.transfer)
        leg = t.leg_of(event.peer) if t else None
        if t is None or leg is None:
            return
        if leg.state is State.MOVING:
            leg.digest = event.digest
            self._quiet(t, leg, now)
        elif leg.state is State.EXPOSED:
            if event.digest == leg.digest:
                self._move(t, leg, Cause.DONE, now)
            else:
                detail = f"digest {event.digest} here, {leg.digest} at {event.peer}"
                self._fail(t, Reason.INTEGRITY, detail, now, leg, Cause.STOPPED)
                self.peers.send(event.peer, Ack(t.id, False, Reason.INTEGRITY, detail))
        self._settle(t, now)

    def _op_ended(self, event: OpDone | OpFailed, now: float) -> None:
        found = self._ops.pop(event.op_id, None)
        if found is None:
            return
        t, leg = found
        leg.ops.pop(event.op_id, None)
        if isinstance(event, OpDone):
            leg.nbytes += event.nbytes
            self._quiet(t, leg, now)
        elif leg.state is State.MOVING:
            self._fail(t, event.reason, event.detail or "an operation failed", now, leg, Cause.BROKEN)
        if leg.state in (State.DRAINING, State.FENCING) and not leg.ops:
            self._move(t, leg, Cause.DRAINED, now)
        self._settle(t, now)

    # ------------------------------------------------------------ peers' messages

    def _message(self, association: Association, message: Message, now: float) -> None:
        match message:
            case GrantMessage():
                self._on_grant(association, message, now)
            case Renew():
                for transfer in message.transfers:
                    self._on_renew(association, transfer, now)
                if message.echo:
                    self.peers.send(association.peer, Renew())
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
        stone = self._tombstones.get(grant.transfer)
        t = self._transfers.get(grant.transfer)
        refusal: tuple[Reason, str] | None = None
        if (grant.owner, grant.epoch, grant.mode) != (peer, association.info.epoch, Mode.PUSH):
            refusal = (Reason.EPOCH, "a grant of another owner, epoch or mode")
        elif stone is not None:
            refusal = (stone.reason or Reason.UNKNOWN_TRANSFER, stone.detail)
        elif t is None and self._draining is not None:
            refusal = (Reason.DRAINING, "no new transfers")
        elif t is None and (self._tombstones.full or len(self._transfers) >= self.limits.transfers):
            refusal = (Reason.NO_CAPACITY, "too many transfers")
        elif t is not None and not (t.mode is Mode.PUSH and t.initiates and t.instance in (None, peer.instance)):
            refusal = (Reason.UNKNOWN_TRANSFER, "this transfer is another one here")
        elif t is not None and t.failed is not None:
            refusal = t.failed
        if refusal is not None:
            self.peers.send(peer, Stopped(grant.transfer, *refusal))
            return
        if t is None:
            t = self._create(grant.transfer, Mode.PUSH, Side.INITIATOR, now)
            self._out.append(Report(Offered(grant)))
        leg = self._leg_for(t, association, now)
        if leg is not None and leg.grant is None and not leg.terminal:
            problem = self._misfit(t, leg, association, message)
            if problem:
                self._fail(t, *problem, now)
            else:
                self._granted(t, leg, grant, now)
        self._settle(t, now)

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
        for first, low, blocks in zip(message.first, t.own.first, t.own.blocks.groups, strict=True):
            if not low <= first <= low + len(blocks):
                return Reason.BOUNDS, f"blocks from {message.first} on were moved, from {t.own.first} on are exposed"
        return None

    def _leg_for(self, t: Transfer, association: Association, now: float) -> Leg | None:
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
                    self._fail(t, Reason.LAYOUT, str(mismatch), now)
                return None
        if (t.instance, t.epoch) != (association.peer.instance, association.info.epoch):
            return None
        leg = t.leg_of(association.peer)
        if leg is not None and leg.plan is None and not leg.terminal:
            try:
                self._plan(t, leg, association)
            except LayoutMismatch as mismatch:
                self._fail(t, Reason.LAYOUT, str(mismatch), now)
        return leg

    def _on_renew(self, association: Association, transfer: str, now: float) -> None:
        peer, t = association.peer, self._transfers.get(transfer)
        if t is None:
            stone = self._tombstones.get(transfer)
            if stone is None:
                self._keep(peer, transfer, Renew((transfer,)), now + self.limits.lease_s)
                return
            reason = stone.reason or Reason.UNKNOWN_TRANSFER
            if stone.side is not Side.TARGET:
                self.peers.send(peer, Stopped(transfer, reason, stone.detail))
            if stone.side is not Side.INITIATOR:
                self.peers.send(peer, Revoke(transfer, reason, stone.detail))
        elif t.initiates:
            t.patience_from = now
        else:
            leg = self._leg_for(t, association, now)
            if leg is None:
                self.peers.send(peer, Revoke(transfer, Reason.UNKNOWN_TRANSFER, "the ticket has another reader"))
            elif leg.terminal:
                self.peers.send(peer, Revoke(transfer, *(t.failed or (Reason.UNKNOWN_TRANSFER, "is over"))))
            else:
                leg.lease_until = now + t.lease_s

    def _on_done(self, association: Association, message: Done, now: float) -> None:
        peer, t = association.peer, self._transfers.get(message.transfer)
        if t is None:
            stone = self._tombstones.get(message.transfer)
            if stone is None:
                self._keep(peer, message.transfer, message, now + self.limits.grace_s)
            else:
                accepted = (peer, association.info.epoch) in stone.accepted
                self._ack(peer, message.transfer, None if accepted else (stone.reason or Reason.UNKNOWN_TRANSFER, ""))
            return
        leg = None if t.initiates else self._leg_for(t, association, now)
        if leg is None or t.own is None:
            self._ack(peer, t.id, (Reason.UNKNOWN_TRANSFER, "the ticket has another reader"))
        elif leg.terminal:
            self._ack(peer, t.id, None if leg.state is State.DONE else t.failed or (Reason.UNKNOWN_TRANSFER, ""))
        elif leg.state is State.EXPOSED:
            problem = self._misfit(t, leg, association, message)
            if problem:
                self._fail(t, *problem, now, leg, Cause.STOPPED)
                self._ack(peer, t.id, problem)
            else:
                self._completed(t, leg, message, now)
        else:
            self._move(t, leg, Cause.DONE, now)
        self._settle(t, now)

    def _completed(self, t: Transfer, leg: Leg, message: Done, now: float) -> None:
        """Target, EXPOSED: the peer says that every byte is moved."""
        assert t.own is not None and leg.plan is not None
        groups = zip(t.own.blocks.groups, t.own.first, message.first, strict=True)
        tail = Part(None, message.first, BlockTable(tuple(blocks[first - low :] for blocks, low, first in groups)))
        if t.mode is Mode.PULL:
            leg.nbytes = leg.plan.ranges(t.role, tail).nbytes
        if not self.integrity or leg.empty:
            self._move(t, leg, Cause.DONE, now)
        elif leg.digest is None:
            leg.digest = message.digest
            self._digest(t, leg, [leg.plan.units(t.role, tail, t.tokens)])

    def _ack(self, peer: Peer, transfer: str, refusal: tuple[Reason, str] | None) -> None:
        reason, detail = refusal or (None, "")
        self.peers.send(peer, Ack(transfer, refusal is None, reason, detail))

    def _on_ack(self, association: Association, message: Ack, now: float) -> None:
        t = self._transfers.get(message.transfer)
        leg = t.leg_of(association.peer) if t else None
        if t is None or leg is None or leg.state is not State.SETTLING or leg.epoch != association.info.epoch:
            return
        if message.ok:
            self._move(t, leg, Cause.ACK, now)
        else:
            reason = message.reason or Reason.OTHER
            self._fail(t, reason, f"not acknowledged by {association.peer}: {message.detail}", now, leg, Cause.NACK)
        self._settle(t, now)

    def _on_revoke(self, association: Association, message: Revoke, now: float) -> None:
        peer, t = association.peer, self._transfers.get(message.transfer)
        if t is None:
            stone = self._tombstones.get(message.transfer)
            if stone is None:
                # The abort has overtaken its grant, or this side's engine: it is remembered.
                detail = message.detail or f"revoked by {peer}"
                self._bury(Tombstone(message.transfer, None, message.reason, detail, frozenset(), False, False), now)
            self.peers.send(peer, Stopped(message.transfer, message.reason))
            return
        if not t.initiates:
            leg = t.leg_of(peer)
            if t.mode is Mode.PUSH and leg is not None and leg.grant is None and not leg.terminal:
                self._fail(t, message.reason, message.detail or f"refused by {peer}", now)
            self._settle(t, now)
            return
        leg = self._leg_for(t, association, now)
        if leg is None:
            self.peers.send(peer, Stopped(message.transfer, message.reason))
        elif leg.terminal:
            self.peers.send(peer, Stopped(message.transfer, *(t.failed or (message.reason, ""))))
        else:
            self._fail(t, message.reason, message.detail or f"revoked by {peer}", now, leg, Cause.REVOKE)
        self._settle(t, now)

    def _on_stopped(self, association: Association, message: Stopped, now: float) -> None:
        t = self._transfers.get(message.transfer)
        detail = message.detail or f"stopped by {association.peer}"
        if t is None:
            if self._tombstones.get(message.transfer) is None:
                stone = Tombstone(message.transfer, None, message.reason, detail, frozenset(), False, False)
                self._bury(stone, now)
            return
        if t.initiates:
            return
        leg = self._leg_for(t, association, now)
        if leg is not None and not leg.terminal:
            self._fail(t, message.reason, detail, now, leg, Cause.STOPPED)
        self._settle(t, now)

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
                return True, "", msgspec.json.encode(self.snapshot()).decode()
            case "drain":
                try:
                    grace = max(0.0, float(command.argument or "0"))
                except ValueError:
                    return False, f"{command.argument!r} is not a number of seconds", ""
                self._draining = now + grace
                return True, f"draining {len(self._transfers)} transfers", ""
            case "release":
                return (*self._release(command.argument, now), "")
            case _:
                return False, f"unknown command {command.verb!r}; known are status, drain, release", ""

    def _release(self, text: str, now: float) -> tuple[bool, str]:
        """A router gives a ticket back: no reader will come."""
        try:
            ticket = wire.parse_ticket(text)
        except RemoteProtocolError as problem:
            return False, str(problem)
        if not self.ticket_holds(ticket):
            return False, "the ticket is of another secret, instance or start"
        t = self._transfers.get(ticket.grant.transfer)
        if t is None or t.failed or t.initiates:
            return False, "the transfer is over or unknown"
        if t.met:
            return False, "a reader has taken the ticket up"
        self._fail(t, Reason.ABORTED, "released by an operator", now)
        self._settle(t, now)
        return True, "released"

    def ticket_holds(self, ticket: Ticket) -> bool:
        """Whether this start of this instance made the ticket."""
        mine = (ticket.grant.owner.instance, ticket.grant.epoch) == (self.info.instance, self.info.epoch)
        return mine and wire.ticket_holds(ticket, self._key)

    # -------------------------------------------- words for and from the unknown

    def _keep(self, peer: Peer, transfer: str, message: Message, until: float) -> None:
        """A message for a transfer never heard of waits: the engine's call may be one step behind."""
        held = self._strangers.get(transfer)
        if held is None and len(self._strangers) >= self.limits.transfers:
            self.peers.dropped += 1
            return
        kept = [*held[1], (peer, message)] if held else [(peer, message)]
        self._strangers[transfer] = (max(until, held[0]) if held else until, kept[-8:])

    def _recognise(self, transfer: str, now: float) -> None:
        """The engine's call has come: what waited for it acts now."""
        held = self._strangers.pop(transfer, None)
        for peer, message in held[1] if held else ():
            association = self.peers.known.get(peer)
            if association:
                self._message(association, message, now)

    def _dismiss(self, transfer: str) -> None:
        """Nobody here knows this transfer: say so (R9)."""
        _, messages = self._strangers.pop(transfer)
        for peer, message in messages:
            if isinstance(message, Done):
                self._ack(peer, transfer, (Reason.UNKNOWN_TRANSFER, "never heard of"))
            else:
                self.peers.send(peer, Revoke(transfer, Reason.UNKNOWN_TRANSFER, "never heard of"))

    def _owe(
        self, transfer: str, mode: Mode, side: Side, reason: Reason, detail: str, address: str | None, now: float
    ) -> None:
        """Tell whoever is at the address that this transfer is given up, although no leg reaches there."""
        if address is None:
            return
        errand = Errand(transfer, mode, side, reason, detail, now + self.limits.lease_s, True)
        association = self.peers.reach(address, now)
        if association:
            self._run(errand, association, now)
        else:
            self.peers.owe(address, errand, now)

    def _run(self, errand: Errand, association: Association, now: float) -> None:
        message = (
            Stopped(errand.transfer, errand.reason, errand.detail)
            if errand.side is Side.INITIATOR
            else Revoke(errand.transfer, errand.reason, errand.detail)
        )
        if not errand.spread:
            self.peers.send(association.peer, message)
            return
        role = ROLE[(errand.mode, errand.side)]
        try:
            ranks = [rank for rank, _ in self._ranks(role, *self._in_order(role, association.info.layout))]
        except LayoutMismatch:
            ranks = list(range(len(association.info.addresses)))
        for rank in ranks:
            if rank == association.info.rank:
                self.peers.send(association.peer, message)
            else:
                self.peers.owe(association.info.addresses[rank], evolve(errand, spread=False), now)

    # --------------------------------------------------------------- who is there

    def _facts(self, facts: list[Met | Unreachable | Gone], now: float) -> None:
        for fact in facts:
            match fact:
                case Met():
                    self._met(fact, now)
                case Unreachable():
                    self._unreachable(fact, now)
                case Gone():
                    self._gone(fact, now)

    def _met(self, fact: Met, now: float) -> None:
        association = fact.association
        peer, addresses = association.peer, {fact.address, association.info.address}
        for t in list(self._transfers.values()):
            if not t.met and t.failed is None and t.address in addresses and t.address == (fact.address or t.address):
                self._meet(t, association, now)
                self._settle(t, now)
        for transfer in list(self._of_peer.get(peer, ())):
            t = self._transfers[transfer]
            leg = t.leg_of(peer)
            if leg is not None and not leg.terminal and leg.epoch == association.info.epoch:
                self._repeat(t, leg, association, now)
                self._settle(t, now)
        for address in addresses - {None}:
            for errand in self.peers.errands.pop(address or "", ()):
                self._run(errand, association, now)
        for envelope in fact.parked:
            admitted = self.peers.admit(fact.link, envelope, now)
            if admitted:
                self._message(admitted, envelope.message, now)

    def _repeat(self, t: Transfer, leg: Leg, association: Association, now: float) -> None:
        """After Hello each side says again what is unanswered; Ack and Stopped are only answers."""
        active = t.address is not None
        match leg.state:
            case State.EXPOSED if t.mode is Mode.PUSH and leg.grant is not None:
                self._send_grant(t, leg, association)
            case State.REVOKING | State.FENCING if not t.initiates:
                self._revoke(t, leg)
            case State.SETTLING:
                self._done(t, leg)
            case State.GRANTED | State.MOVING if t.engaged:
                self._renew(t, leg, now)
            case State.NEW | State.STAGED | State.EXPOSED if active:
                self._join(t, leg, now)
            case _:
                pass

    def _unreachable(self, fact: Unreachable, now: float) -> None:
        for t in list(self._transfers.values()):
            if t.failed is not None:
                continue
            if not t.met and t.address == fact.address:
                self._fail(t, fact.reason, fact.detail, now, t.legs[0], Cause.LOST)
            for leg in t.open_legs():
                if t.met and leg.plan is None and leg.address == fact.address:
                    self._fail(t, fact.reason, fact.detail, now, leg, Cause.LOST)
            self._settle(t, now)

    def _gone(self, fact: Gone, now: float) -> None:
        for transfer in list(self._of_peer.get(fact.peer, ())):
            t = self._transfers[transfer]
            leg = t.leg_of(fact.peer)
            if leg is None or leg.terminal:
                continue
            if fact.reborn:
                leg.proven_dead = True
            if leg.state is State.FENCING:
                self._quarantine(leg, now)
            elif t.mode is Mode.PULL and not t.initiates:
                if fact.reborn:
                    self._fail(t, fact.reason, fact.detail, now)
            else:
                self._fail(t, fact.reason, fact.detail, now, leg, Cause.LOST)
            self._settle(t, now)

    # --------------------------------------------------------------------- failing

    def _fail(
        self, t: Transfer, reason: Reason, detail: str, now: float, leg: Leg | None = None, cause: Cause = Cause.ABORT
    ) -> None:
        """A transfer fails once and stays failed; its other legs are aborted at once (R6)."""
        if cause in _MILD and all(other.state in _COMPLETE for other in t.legs):
            return
        if t.failed is None:
            t.failed = (reason, detail[:900])
        if leg is not None and not leg.terminal:
            self._move(t, leg, self._fit(t, leg, cause), now)
        for other in t.open_legs():
            if other is not leg and other.state not in _FAILING:
                self._move(t, other, self._fit(t, other, Cause.ABORT), now)

    @staticmethod
    def _fit(t: Transfer, leg: Leg, cause: Cause) -> Cause:
        """A target has fewer causes: before its grant has left nothing can land at all."""
        if t.initiates:
            return cause
        if t.mode is Mode.PUSH and leg.grant is None:
            return Cause.UNSENT
        if t.mode is Mode.PULL and cause is Cause.LOST:
            return Cause.ABORT
        return Cause.ABORT if cause in (Cause.REVOKE, Cause.PATIENCE) else cause

    def _move(self, t: Transfer, leg: Leg, cause: Cause, now: float) -> None:
        """One transition and what entering the new state brings with it."""
        old, leg.state = leg.state, step(t.table(leg), leg.state, cause)
        if leg.state is old:
            return
        leg.until = None
        match leg.state:
            case State.SETTLING:
                leg.until = now + self.limits.ack_wait_s
                self._done(t, leg)
            case State.DRAINING:
                leg.until = now + self.limits.drain_limit_s
                if leg.capabilities is not None and leg.capabilities.cancel:
                    self._out.extend(Cancel(op_id) for op_id in leg.ops)
                if not leg.ops:
                    self._move(t, leg, Cause.DRAINED, now)
            case State.REVOKING:
                leg.until = now + self.limits.grace_s
                self._out.append(Forbid(t.id))
                self._revoke(t, leg)
            case State.FENCING:
                self._quarantine(leg, now)
                if not t.initiates:
                    self._fence(t, leg, now)
            case State.DONE:
                self._accept(t, leg)
            case State.FAILED:
                self._tell_failure(t, leg, cause)
            case _:
                pass

    def _accept(self, t: Transfer, leg: Leg) -> None:
        """Target: this leg's bytes are there; its Done is remembered, so that a repeated one gets the same answer."""
        if not t.initiates and leg.peer is not None:
            t.accepted |= {(leg.peer, leg.epoch)}
            self._ack(leg.peer, t.id, None)

    def _tell_failure(self, t: Transfer, leg: Leg, cause: Cause) -> None:
        """A failed leg's peer is told what it may rely on."""
        if leg.peer is None:
            return
        reason, detail = t.failed or (Reason.OTHER, "")
        if t.initiates:
            if cause is not Cause.NACK:
                self.peers.send(leg.peer, Stopped(t.id, reason, detail))
        elif cause is Cause.DONE:
            self._ack(leg.peer, t.id, (reason, detail))
        elif cause not in (Cause.STOPPED, Cause.FENCED, Cause.FORBIDDEN):
            self.peers.send(leg.peer, Revoke(t.id, reason, detail))

    def _quarantine(self, leg: Leg, now: float) -> None:
        """Proof that the writer is gone starts the clock; without it time frees nothing (R1)."""
        if leg.proven_dead:
            if leg.until is None or leg.until > now + self.limits.quarantine_s:
                leg.until = now + self.limits.quarantine_s
        elif leg.until is None:
            leg.until = now + self.limits.grace_s

    def _fence(self, t: Transfer, leg: Leg, now: float) -> None:
        """Ask again, and cut the peer off where the transport can; older grants die with the generation (R2)."""
        self._revoke(t, leg)
        assert leg.peer is not None and leg.capabilities is not None
        if leg.capabilities.fence is not FenceScope.PEER or leg.grant is None:
            return
        association = self.peers.known[leg.peer]
        if leg.grant.generation < association.generation:
            return
        association.generation += 1
        self._out.append(Fence(leg.peer, association.generation))
        for transfer in list(self._of_peer.get(leg.peer, ())):
            other = self._transfers[transfer]
            twin = other.leg_of(leg.peer)
            if other is not t and twin is not None and twin.grant is not None and twin.state is State.EXPOSED:
                if other.mode is Mode.PUSH and not other.initiates:
                    self._fail(other, Reason.PEER_LOST, f"{leg.peer} was fenced", now, twin, Cause.LOST)
                    self._settle(other, now)

    def _fenced(self, event: Fenced, now: float) -> None:
        for transfer in list(self._of_peer.get(event.peer, ())):
            t = self._transfers[transfer]
            leg = t.leg_of(event.peer)
            if leg is None or t.initiates or leg.state is not State.FENCING or leg.grant is None:
                continue
            if leg.grant.generation < event.generation:
                self._move(t, leg, Cause.FENCED, now)
                self._settle(t, now)

    def _forbidden(self, t: Transfer, leg: Leg, now: float) -> None:
        if not t.initiates and t.mode is Mode.PUSH and leg.state in (State.REVOKING, State.FENCING):
            if Cause.FORBIDDEN in t.table(leg)[leg.state]:
                self._move(t, leg, Cause.FORBIDDEN, now)

    def _each_leg(self, transfer: str, act: Callable[[Transfer, Leg], None], now: float) -> None:
        t = self._transfers.get(transfer)
        if t is not None:
            for leg in t.open_legs():
                act(t, leg)
            self._settle(t, now)

    # --------------------------------------------------------------- what is sent

    def _done(self, t: Transfer, leg: Leg) -> None:
        assert leg.peer is not None and leg.plan is not None
        legs = self._legs_at(t, self.peers.known[leg.peer])
        self.peers.send(leg.peer, Done(t.id, legs, self._first_there(t, leg), leg.plan.digest, leg.digest or ""))

    def _revoke(self, t: Transfer, leg: Leg) -> None:
        if leg.peer is not None:
            self.peers.send(leg.peer, Revoke(t.id, *(t.failed or (Reason.OTHER, ""))))

    def _renew(self, t: Transfer, leg: Leg, now: float) -> None:
        """Say that this side still wants the transfer; its own lease counts anew from here (R5)."""
        leg.renew_at = now + t.lease_s / 3
        if leg.grant is not None:
            leg.renew_at = now + leg.grant.lease_s / 3
            if t.initiates:
                leg.lease_until = now + leg.grant.lease_s
        if leg.peer is not None:
            self.peers.send(leg.peer, Renew((t.id,)))

    # ------------------------------------------------------------ reports and ends

    def _settle(self, t: Transfer, now: float) -> None:
        """Report what is due, and forget the transfer once nothing more can come of it (R6, R7)."""
        if t.id not in self._transfers:
            return
        if t.over and t.own is not None:
            self._out.append(Forbid(t.id))  # before the engine hears: not even a lying peer writes afterwards
        if t.engaged and not t.reported and (t.failed is not None or t.finished) and t.settled:
            t.reported = True
            reason, detail = t.failed or (None, "")
            moved = sum(leg.nbytes for leg in t.legs if leg.state is State.DONE or t.initiates)
            ok = t.failed is None
            self._report(Outcome(t.id, ok, reason, detail, t.mode, t.role, moved, now - t.started, len(t.parts)))
        if not t.over:
            heapq.heappush(self._due, (self._due_at(t), t.id))
            return
        owed = t.handed and not t.finished
        if t.handed and t.finished:
            self._out.append(Report(Released(t.id)))
        reason, detail = t.failed or (None, "")
        del self._transfers[t.id]
        for leg in t.legs:
            for op_id in leg.ops:
                self._ops.pop(op_id, None)
            if leg.peer is not None and (open_here := self._of_peer.get(leg.peer)):
                open_here.discard(t.id)
        self._bury(Tombstone(t.id, t.side, reason, detail, t.accepted, t.reported, owed), now)

    def _report(self, outcome: Outcome) -> None:
        self._count("ok" if outcome.ok else f"failed.{outcome.reason.value if outcome.reason else 'other'}")
        self._out.append(Report(outcome))

    def _bury(self, stone: Tombstone, now: float) -> None:
        self._tombstones.bury(stone, now)

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    # ------------------------------------------------------------------------ time

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, transfer = heapq.heappop(self._due)
            t = self._transfers.get(transfer)
            if t is None:
                continue
            if self._due_at(t) <= now:
                self._time(t, now)
                self._settle(t, now)
            else:
                heapq.heappush(self._due, (self._due_at(t), transfer))
        for transfer, (until, _) in list(self._strangers.items()):
            if now >= until:
                self._dismiss(transfer)
        if self._draining is not None and now >= self._draining:
            for t in list(self._transfers.values()):
                if t.failed is None:
                    self._fail(t, Reason.DRAINING, "the instance is draining", now)
                    self._settle(t, now)
            self._draining = float("inf")
        self._facts(self.peers.expire(now), now)

    def _due_at(self, t: Transfer) -> float:
        return min((self._leg_due(t, leg) for leg in t.open_legs()), default=0.0)

    def _leg_due(self, t: Transfer, leg: Leg) -> float:
        return min((moment for moment, _, _, _ in self._deadlines(t, leg)), default=float("inf"))

    def _deadlines(self, t: Transfer, leg: Leg) -> list[tuple[float, Cause | None, Reason, str]]:
        """Every bound of this leg's wait: (moment, cause, reason, detail); cause None: renew (R8)."""
        limits = self.limits
        total = (t.started + limits.transfer_max_s, Cause.OVERDUE, Reason.OVERDUE, "the transfer took too long")
        bounds: list[tuple[float, Cause | None, Reason, str]] = []
        if leg.state in (State.SETTLING, State.DRAINING, State.REVOKING, State.FENCING):
            late = {State.SETTLING: "no acknowledgement came", State.DRAINING: "operations did not end"}
            if leg.until is not None:
                bounds.append((leg.until, Cause.OVERDUE, Reason.OVERDUE, late.get(leg.state, "no answer came")))
            return bounds
        bounds.append(total)
        if leg.lease_until is not None:
            bounds.append((leg.lease_until, Cause.LEASE, Reason.LEASE_ENDED, "the lease ended"))
        if leg.renew_at is not None and t.engaged:
            bounds.append((leg.renew_at, None, Reason.OTHER, ""))
        if leg.state is State.MOVING:
            if not t.last:
                gap = t.last_part_at + limits.part_gap_s
                bounds.append((gap, Cause.PATIENCE, Reason.PATIENCE, "the next part did not come"))
            if leg.ops:
                bounds.append((min(leg.ops.values()), Cause.OVERDUE, Reason.OVERDUE, "an operation took too long"))
        elif leg.state is not State.EXPOSED or (t.mode is Mode.PUSH and leg.grant is None):
            waited = t.patience_from + limits.patience_s
            wanted = "grant" if leg.grant is None else "blocks"
            bounds.append((waited, Cause.PATIENCE, Reason.PATIENCE, f"no {wanted} in time"))
        return bounds

    def _time(self, t: Transfer, now: float) -> None:
        for leg in t.open_legs():
            if leg.terminal:
                continue
            ended = [bound for bound in self._deadlines(t, leg) if bound[0] <= now]
            failure = next((bound for bound in ended if bound[1] is not None), None)
            if failure is not None:
                _, cause, reason, detail = failure
                assert cause is not None
                if leg.state is State.FENCING:
                    self._fence_overdue(t, leg, now)
                else:
                    self._fail(t, reason, detail, now, leg, cause)
            elif ended:
                self._renew(t, leg, now)
                self._advance(t, leg, now)

    def _fence_overdue(self, t: Transfer, leg: Leg, now: float) -> None:
        if leg.proven_dead:
            self._move(t, leg, Cause.FENCED, now)
            return
        leg.until = now + self.limits.grace_s
        if not t.initiates:
            self._revoke(t, leg)
