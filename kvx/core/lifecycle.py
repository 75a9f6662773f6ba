"""How an open transfer lives: its operations, its failing, its deadlines, its reports, its end.

Everything that changes a leg's state goes through `move`, everything that ends a transfer
through `settle`. Who the peers are is `contact`'s business, what they say `endpoint`'s.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvx.core.events import (
    Action,
    Cancel,
    Digest,
    Digested,
    Fence,
    Fenced,
    Forbid,
    OpDone,
    OpFailed,
    Post,
    Report,
)
from kvx.core.legs import Leg, Limits, Transfer, first_moved, misfit, provisional
from kvx.core.machine import Cause, State, step
from kvx.core.messages import Ack, Done, Renew, Revoke, Stopped
from kvx.core.model import OP, ROLE, Descriptors, FenceScope, Mode, Outcome, Peer, Reason, Released, Side, Stamp
from kvx.core.peers import Errand, Peers
from kvx.core.tombstones import Tombstone, Tombstones

_FAILING = frozenset({State.DRAINING, State.REVOKING, State.FENCING})
_COMPLETE = frozenset({State.SETTLING, State.DONE})
_MILD = frozenset({Cause.ABORT, Cause.REVOKE, Cause.LEASE, Cause.PATIENCE})
"""Causes that come too late once every leg has moved all its bytes."""
_LATE = {State.SETTLING: "no acknowledgement came", State.DRAINING: "operations did not end"}

AGAIN_S = 0.1
"""Pause before READs are posted again that have come before their owner's Expose."""

Bound = tuple[float, Cause | None, Reason, str]
"""The end of one wait: moment, cause (None: time to renew), reason, detail."""


class Transfers:
    """The open transfers of one rank. Actions are appended to `out`, which the endpoint empties."""

    def __init__(self, peers: Peers, limits: Limits, out: list[Action], *, integrity: bool) -> None:
        self.open: dict[str, Transfer] = {}
        self.of_peer: dict[Peer, dict[str, None]] = {}
        """Open transfers that have a leg with this peer, oldest first."""
        self.tombstones = Tombstones(limits.tombstones, keep_s=3 * limits.lease_s, owed_s=limits.transfer_max_s)
        self.draining = False
        """No new transfers begin."""
        self.counts: dict[str, int] = {}
        self.peers = peers
        self.limits = limits
        self.out = out
        self.integrity = integrity
        self.ops: dict[int, tuple[Transfer, Leg]] = {}
        self._next_op = 1
        self._due: list[tuple[float, str]] = []

    def create(self, transfer: str, mode: Mode, side: Side, now: float) -> Transfer:
        role = ROLE[(mode, side)]
        t = Transfer(transfer, mode, role, now, [provisional(side is Side.INITIATOR)], patience_from=now)
        t.lease_s = self.limits.lease_s
        self.open[transfer] = t
        self._schedule(t, now)
        return t

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # -------------------------------------------------------------- moving bytes

    def advance(self, t: Transfer, leg: Leg, now: float) -> None:
        """Post every staged part that has not been posted; settle when nothing is left."""
        if leg.state is not State.MOVING or leg.grant is None or leg.plan is None:
            return
        problem = misfit(t, leg)
        if problem:
            self.fail(t, *problem, now)
            return
        if leg.again_at is not None:
            if leg.ops or now < leg.again_at:
                return
            leg.again_at, leg.next_part, leg.nbytes = None, 0, 0
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
            self.ops[op_id] = (t, leg)
            mine = Descriptors(local.region[cut], local.offset[cut], local.length[cut])
            theirs = Descriptors(remote.region[cut], remote.offset[cut], remote.length[cut])
            self.out.append(Post(op_id, leg.peer, OP[t.mode], mine, theirs, stamp))

    def _quiet(self, t: Transfer, leg: Leg, now: float) -> None:
        if leg.state is not State.MOVING or leg.ops or not t.last or leg.next_part < len(t.parts) or leg.again_at:
            return
        if self.integrity and not leg.empty and not leg.digest:
            if leg.digest is None:
                self._ask_digest(t, leg)
            return  # the sum is still being made
        self.move(t, leg, Cause.QUIET, now)

    def _ask_digest(self, t: Transfer, leg: Leg) -> None:
        """Initiator: sum up what was moved before Done says so (R13)."""
        assert leg.plan is not None
        leg.digest = ""
        owner = t.owner_part(leg)
        self.digest(t, leg, [leg.plan.units(t.role, part, t.tokens, owner) for part in t.parts])

    def digest(self, t: Transfer, leg: Leg, units: list[tuple[Descriptors, NDArray[np.int64]]]) -> None:
        assert leg.peer is not None
        self.out.append(Digest(t.id, leg.peer, tuple(units)))

    def digested(self, event: Digested, now: float) -> None:
        t = self.open.get(event.transfer)
        leg = t.leg_of(event.peer) if t else None
        if t is None or leg is None:
            return
        if leg.state is State.MOVING:
            leg.digest = event.digest
            self._quiet(t, leg, now)
        elif leg.state is State.EXPOSED:
            if event.digest == leg.digest:
                self.move(t, leg, Cause.DONE, now)
            else:
                detail = f"digest {event.digest} here, {leg.digest} at {event.peer}"
                self.fail(t, Reason.INTEGRITY, detail, now, leg, Cause.STOPPED)
                self.peers.send(event.peer, Ack(t.id, False, Reason.INTEGRITY, detail))
        self.settle(t, now)

    def op_ended(self, event: OpDone | OpFailed, now: float) -> None:
        found = self.ops.pop(event.op_id, None)
        if found is None:
            return
        t, leg = found
        leg.ops.pop(event.op_id, None)
        if isinstance(event, OpDone):
            leg.nbytes += event.nbytes
            self._quiet(t, leg, now)
        elif leg.state is State.MOVING and not self._early(t, leg, event, now):
            self.fail(t, event.reason, event.detail or "an operation failed", now, leg, Cause.BROKEN)
        if leg.state in (State.DRAINING, State.FENCING) and not leg.ops:
            self.move(t, leg, Cause.DRAINED, now)
        self.settle(t, now)

    def _early(self, t: Transfer, leg: Leg, event: OpFailed, now: float) -> bool:
        """Whether the ticket may have overtaken its owner's Expose (R9); then the READs are posted again."""
        if t.mode is not Mode.PULL or event.reason is not Reason.UNKNOWN_TRANSFER:
            return False
        leg.early_since = now if leg.early_since is None else leg.early_since
        if now >= leg.early_since + self.limits.grace_s:
            return False
        leg.again_at = now + AGAIN_S
        return True

    # ------------------------------------------------------------------- failing

    def fail(
        self, t: Transfer, reason: Reason, detail: str, now: float, leg: Leg | None = None, cause: Cause = Cause.ABORT
    ) -> None:
        """A transfer fails once and stays failed; its other legs are aborted at once (R6)."""
        if cause in _MILD and all(other.state in _COMPLETE for other in t.legs):
            return
        if t.failed is None:
            t.failed = (reason, detail[:900])
        if leg is not None and not leg.terminal:
            self.move(t, leg, self._fit(t, leg, cause), now)
        for other in t.open_legs():
            if other is not leg and other.state not in _FAILING:
                self.move(t, other, self._fit(t, other, Cause.ABORT), now)

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

    def move(self, t: Transfer, leg: Leg, cause: Cause, now: float) -> None:
        """One transition and what entering the new state brings with it."""
        old, leg.state = leg.state, step(t.table(leg), leg.state, cause)
        if leg.state is old:
            return
        leg.until = None
        match leg.state:
            case State.SETTLING:
                leg.until = now + self.limits.ack_wait_s
                self.done(t, leg)
            case State.DRAINING:
                leg.until = now + self.limits.drain_limit_s
                if leg.capabilities is not None and leg.capabilities.cancel:
                    self.out.extend(Cancel(op_id) for op_id in leg.ops)
                if not leg.ops:
                    self.move(t, leg, Cause.DRAINED, now)
            case State.REVOKING:
                leg.until = now + self.limits.grace_s
                self.out.append(Forbid(t.id))
                self.revoke(t, leg)
            case State.FENCING:
                self.quarantine(leg, now)
                if not t.initiates:
                    self._fence(t, leg, now)
            case State.DONE:
                self._accept(t, leg)
            case State.FAILED:
                self._tell_failure(t, leg, cause, now)
            case _:
                pass

    def _accept(self, t: Transfer, leg: Leg) -> None:
        """Target: this leg's bytes are there; its Done is remembered, so that a repeated one gets the same answer."""
        if not t.initiates and leg.peer is not None:
            t.accepted |= {(leg.peer, leg.epoch)}
            self.ack(leg.peer, t.id, None)

    def _tell_failure(self, t: Transfer, leg: Leg, cause: Cause, now: float) -> None:
        """A failed leg's peer is told what it may rely on."""
        if leg.peer is None:
            return
        reason, detail = t.failed or (Reason.OTHER, "")
        if t.initiates:
            if cause is not Cause.NACK:
                self._last_word(t, leg, Stopped(t.id, reason, detail), now)
        elif cause is Cause.DONE:
            self.ack(leg.peer, t.id, (reason, detail))
        elif cause not in (Cause.STOPPED, Cause.FENCED, Cause.FORBIDDEN):
            self._last_word(t, leg, Revoke(t.id, reason, detail), now)

    def _last_word(self, t: Transfer, leg: Leg, message: Stopped | Revoke, now: float) -> None:
        """Say it now, or when a rank that was being dialled is reached."""
        assert leg.peer is not None
        if not self.peers.send(leg.peer, message) and leg.address and leg.plan is None:
            until = now + self.limits.lease_s
            errand = Errand(t.id, t.mode, t.side, message.reason, message.detail, until, spread=False)
            self.peers.owe(leg.address, errand, now)

    def quarantine(self, leg: Leg, now: float) -> None:
        """Proof that the writer is gone starts the clock; without it time frees nothing (R1)."""
        dead = leg.dead_since
        leg.until = now + self.limits.grace_s if dead is None else dead + self.limits.quarantine_s

    def _fence(self, t: Transfer, leg: Leg, now: float) -> None:
        """Ask again, and cut the peer off where the transport can; older grants die with the generation (R2)."""
        self.revoke(t, leg)
        assert leg.peer is not None and leg.capabilities is not None
        if leg.capabilities.fence is not FenceScope.PEER or leg.grant is None:
            return
        association = self.peers.known[leg.peer]
        if leg.grant.generation < association.generation:
            return
        association.generation += 1
        self.out.append(Fence(leg.peer, association.generation))
        for transfer in list(self.of_peer.get(leg.peer, ())):
            other = self.open[transfer]
            twin = other.leg_of(leg.peer)
            writable = other.mode is Mode.PUSH and not other.initiates
            if other is t or not writable or twin is None or twin.grant is None or twin.state is not State.EXPOSED:
                continue
            self.fail(other, Reason.PEER_LOST, f"{leg.peer} was fenced", now, twin, Cause.LOST)
            self.settle(other, now)

    def fenced(self, event: Fenced, now: float) -> None:
        for transfer in list(self.of_peer.get(event.peer, ())):
            t = self.open[transfer]
            leg = t.leg_of(event.peer)
            if leg is None or t.initiates or leg.state is not State.FENCING or leg.grant is None:
                continue
            if leg.grant.generation < event.generation:
                self.move(t, leg, Cause.FENCED, now)
                self.settle(t, now)

    def forbidden(self, transfer: str, now: float) -> None:
        """No byte of this transfer can land here any more, whoever wants it."""
        t = self.open.get(transfer)
        if t is None or t.initiates or t.mode is not Mode.PUSH:
            return
        for leg in t.open_legs():
            if leg.state in (State.REVOKING, State.FENCING) and Cause.FORBIDDEN in t.table(leg)[leg.state]:
                self.move(t, leg, Cause.FORBIDDEN, now)
        self.settle(t, now)

    # -------------------------------------------------------------- what is sent

    def ack(self, peer: Peer, transfer: str, refusal: tuple[Reason, str] | None) -> None:
        reason, detail = refusal or (None, "")
        self.peers.send(peer, Ack(transfer, refusal is None, reason, detail))

    def done(self, t: Transfer, leg: Leg) -> None:
        assert leg.peer is not None and leg.plan is not None
        legs = leg.heard
        self.peers.send(leg.peer, Done(t.id, legs, first_moved(t, leg), leg.plan.digest, leg.digest or ""))

    def revoke(self, t: Transfer, leg: Leg) -> None:
        if leg.peer is not None:
            self.peers.send(leg.peer, Revoke(t.id, *(t.failed or (Reason.OTHER, ""))))

    def renew(self, t: Transfer, leg: Leg, now: float) -> None:
        """Say that this side still wants the transfer; its own lease counts anew from each Renew that left (R5)."""
        lease_s = t.lease_s if leg.grant is None else leg.grant.lease_s
        leg.renew_at = now + lease_s / 3
        left = leg.peer is not None and self.peers.send(leg.peer, Renew((t.id,)))
        if left and t.initiates and leg.grant is not None:
            leg.lease_until = now + lease_s

    # ---------------------------------------------------------- reports and ends

    def settle(self, t: Transfer, now: float) -> None:
        """Report what is due, and forget the transfer once nothing more can come of it (R6, R7)."""
        if t.id not in self.open:
            return
        if t.over and t.own is not None:
            self.out.append(Forbid(t.id))  # before the engine hears: not even a lying peer writes afterwards
        if t.engaged and not t.reported and (t.failed is not None or t.finished) and t.settled:
            t.reported = True
            reason, detail = t.failed or (None, "")
            moved = sum(leg.nbytes for leg in t.legs if leg.state is State.DONE or t.initiates)
            ok = t.failed is None
            self.report(Outcome(t.id, ok, reason, detail, t.mode, t.role, moved, now - t.started, len(t.parts)))
        if not t.over:
            self._schedule(t, self._due_at(t))
            return
        owed = t.handed and not t.finished
        if t.handed and t.finished:
            self.out.append(Report(Released(t.id)))
        reason, detail = t.failed or (None, "")
        del self.open[t.id]
        for leg in t.legs:
            for op_id in leg.ops:
                self.ops.pop(op_id, None)
            if leg.peer is not None and (open_here := self.of_peer.get(leg.peer)):
                open_here.pop(t.id, None)
        self.tombstones.bury(Tombstone(t.id, t.side, reason, detail, t.accepted, t.reported, owed), now)

    def report(self, outcome: Outcome) -> None:
        self.count("ok" if outcome.ok else f"failed.{outcome.reason.value if outcome.reason else 'other'}")
        self.out.append(Report(outcome))

    # ---------------------------------------------------------------------- time

    def deadline(self) -> float | None:
        """The earliest end of any wait; None while nothing is open."""
        while self._due:
            moment, transfer = self._due[0]
            t = self.open.get(transfer)
            if t is not None and self._due_at(t) <= moment:
                return moment
            heapq.heappop(self._due)
            if t is not None and t.due == moment:
                t.due = float("inf")
                self._schedule(t, self._due_at(t))
        return None

    def _schedule(self, t: Transfer, moment: float) -> None:
        """Look at this transfer at `moment`, unless that happens earlier anyway."""
        if moment < t.due:
            t.due = moment
            heapq.heappush(self._due, (moment, t.id))

    def expire(self, now: float) -> None:
        """Let time pass for every transfer whose moment has come."""
        while (moment := self.deadline()) is not None and moment <= now:
            _, transfer = heapq.heappop(self._due)
            t = self.open[transfer]
            t.due = float("inf")
            self._time(t, now)
            self.settle(t, now)

    def _due_at(self, t: Transfer) -> float:
        return min((bound[0] for leg in t.open_legs() for bound in self._deadlines(t, leg)), default=float("inf"))

    def _deadlines(self, t: Transfer, leg: Leg) -> list[Bound]:
        """Every bound of this leg's wait: (moment, cause, reason, detail); cause None: renew (R8)."""
        limits = self.limits
        total = (t.started + limits.transfer_max_s, Cause.OVERDUE, Reason.OVERDUE, "the transfer took too long")
        bounds: list[Bound] = []
        if leg.state in (State.SETTLING, State.DRAINING, State.REVOKING, State.FENCING):
            if leg.until is not None:
                bounds.append((leg.until, Cause.OVERDUE, Reason.OVERDUE, _LATE.get(leg.state, "no answer came")))
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
            if leg.again_at is not None and not leg.ops:
                bounds.append((leg.again_at, None, Reason.OTHER, ""))
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
                    self.fail(t, reason, detail, now, leg, cause)
            elif ended:
                if leg.renew_at is not None and leg.renew_at <= now:
                    self.renew(t, leg, now)
                self.advance(t, leg, now)

    def _fence_overdue(self, t: Transfer, leg: Leg, now: float) -> None:
        """The quarantine after a proven death is over; or it is time to ask again."""
        if leg.dead_since is not None:
            self.move(t, leg, Cause.FENCED, now)
            return
        self.quarantine(leg, now)
        association = self.peers.known.get(leg.peer) if leg.peer else None
        if association is not None and association.link is None:
            self.peers.dial(association.address, now)  # a restarted peer would prove the old one dead
        if not t.initiates:
            self.revoke(t, leg)
