"""The simulated transport: bytes that land late, in pieces, or not at all, and never after it said so (R14)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from attrs import define, frozen

from kvx.core.events import OpDone, OpFailed, Post
from kvx.core.model import Access, FenceScope, Op, Reason
from kvx_conformance.room import Note
from kvx_conformance.scenarios import Plane
from kvx_conformance.toy import covered

if TYPE_CHECKING:
    from kvx_conformance.fabric import Fabric, Process

Pieces = list[tuple[int, int, int]]
"""Local offset, remote offset, length; bytes."""


@define(eq=False)
class Operation:
    """One one-sided operation under way. Its bytes land in several groups, at any time."""

    op_id: int
    op: Op
    transfer: str
    initiator: Process
    target: Process
    post: Post
    pieces: Pieces  # still to land
    ended: bool = False
    hung: bool = False

    @property
    def rng(self) -> random.Random:
        return self.initiator.fabric.chance("operations", self.initiator.info.peer, self.transfer)


@frozen
class Landed:
    """For a trace: bytes have come into these blocks of a process."""

    op: Op
    op_id: int
    transfer: str
    blocks: tuple[int, ...]


@define(eq=False)
class OneSided:
    """Operations between the memories of the processes of one fabric."""

    fabric: Fabric

    def post(self, process: Process, action: Post) -> None:
        local, remote = action.local.pieces(), action.remote.pieces()
        pieces = [(a[1], b[1], a[2]) for a, b in zip(local, remote, strict=True)]
        if any(a[2] != b[2] for a, b in zip(local, remote, strict=True)):
            self.fabric.violation(f"{process.name} posted pieces of unequal lengths for {action.stamp.transfer}")
        target = process.peers.get(action.peer)
        if target is None:
            self.fabric.violation(f"{process.name} posted to {action.peer}, which was never introduced")
            return
        op = Operation(action.op_id, action.op, action.stamp.transfer, process, target, action, pieces)
        process.ops[op.op_id] = op
        rng, climate = op.rng, self.fabric.climate
        rng.shuffle(pieces)
        groups = rng.choice((1, 1, 2, 3))
        share = -(-len(pieces) // groups)
        moments = sorted(rng.expovariate(1 / climate.op_s) for _ in range(groups))
        fate = rng.random()
        breaks_at = rng.randrange(groups + 1)
        for number, moment in enumerate(moments):
            batch = pieces[number * share : (number + 1) * share]
            if fate < climate.op_fails and number >= breaks_at:
                self.fabric.clock.after(moment, lambda: self._end(op, "the network failed"))
                return
            if climate.op_fails <= fate < climate.op_fails + climate.op_hangs and number >= breaks_at:
                self._hang(op, pieces[number * share :], moment)
                return
            if 1 - climate.op_hangs_forever < fate and number >= breaks_at:
                op.hung = True
                return
            self.fabric.clock.after(moment, lambda batch=batch: self._land(op, batch))  # type: ignore[misc]
        self.fabric.clock.after(moments[-1] + self.fabric.delay(rng), lambda: self._finish(op))

    def _hang(self, op: Operation, rest: Pieces, moment: float) -> None:
        op.hung = True
        late = moment + op.rng.uniform(0.5, 4.0) * self.fabric.climate.limits.op_timeout_s
        self.fabric.clock.after(late, lambda: self._land(op, rest))
        self.fabric.clock.after(late + 0.01, lambda: self._finish(op))

    def cancel(self, process: Process, op_id: int) -> None:
        op = process.ops.get(op_id)
        if op is not None and op.rng.random() < 0.9:
            self.fabric.soon(op.rng, lambda: self._end(op, "cancelled"))

    def _held(self, *ways: tuple[Process, Process]) -> float | None:
        """When data can take all these ways again; None: it does now."""
        moments = [self.fabric.held_until(Plane.DATA, *way) for way in ways]
        return max((moment for moment in moments if moment is not None), default=None)

    def _finish(self, op: Operation) -> None:
        if op.ended:
            return
        until = self._held((op.target, op.initiator))  # the acknowledgement
        if until is not None:
            self.fabric.clock.at(until + self.fabric.delay(op.rng), lambda: self._finish(op))
            return
        if op.pieces:
            self.fabric.clock.after(0.01, lambda: self._finish(op))
            return
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        op.initiator.feed(OpDone(op.op_id, op.post.local.nbytes))

    def _end(self, op: Operation, detail: str, reason: Reason = Reason.TRANSPORT) -> None:
        """R14: from here on no byte lands."""
        if op.ended:
            return
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        self.fabric.soon(op.rng, lambda: op.initiator.feed(OpFailed(op.op_id, reason, detail)))

    def _land(self, op: Operation, batch: Pieces) -> None:
        """Some bytes arrive, unless something on the way forbids it."""
        if op.ended:
            return
        source, target = op.initiator, op.target
        back = [(target, source)] if op.op is Op.READ else []  # what was asked for
        until = self._held((source, target), *back)
        if until is not None:
            if op.rng.random() < 0.3:
                self._end(op, "the network was cut")
            else:
                self.fabric.clock.at(until + self.fabric.delay(op.rng), lambda: self._land(op, batch))
            return
        if not target.alive:
            self._end(op, "the target is gone")
            return
        if not source.alive and (op.op is Op.READ or not self._echoes(source)):
            op.ended = True
            return
        refusal = self._refused(op, batch)
        if refusal:
            known = op.transfer in target.permits
            self._end(op, refusal, Reason.TRANSPORT if known else Reason.UNKNOWN_TRANSFER)
            return
        self._copy(op, batch)
        for piece in batch:
            op.pieces.remove(piece)

    def _echoes(self, dead: Process) -> bool:
        """A dead writer's bytes still come out of its network card for a while; R1 waits for that long."""
        assert dead.died_at is not None
        return self.fabric.clock.now < dead.died_at + 0.8 * self.fabric.climate.limits.quarantine_s

    def _refused(self, op: Operation, batch: Pieces) -> str | None:
        stamp, target, peer = op.post.stamp, op.target, op.initiator.info.peer
        capabilities = self.fabric.climate.capabilities
        if capabilities.fence is FenceScope.PEER and stamp.generation < target.fences.get(peer, 0):
            return "an older generation"
        if stamp.epoch != target.info.epoch:
            return "another epoch"
        if capabilities.access is Access.REGION:
            return None
        for permit in target.permits.get(stamp.transfer, ()):
            fits = permit.peer in (None, peer) and permit.op is op.op and permit.stamp == stamp
            if fits and all(covered((0, there, size), permit.ranges) for _, there, size in batch):
                return None
        return "not permitted"

    def _copy(self, op: Operation, batch: Pieces) -> None:
        writes = op.op is Op.WRITE
        owner = op.target if writes else op.initiator
        blocks = owner.cache.blocks_of((there if writes else here, size) for here, there, size in batch)
        if self.fabric.trace and batch:
            landed = Landed(op.op, op.op_id, op.transfer, tuple(sorted(blocks)))
            self.fabric.trace(Note(self.fabric.clock.now, owner.name, "--", landed))
        strangers = {owner.pool.owner.get(block, "nobody") for block in blocks} - {op.transfer}
        if strangers:
            kind = "WRITE" if writes else "READ"
            self.fabric.violation(
                f"a {kind} of {op.transfer} landed in blocks of {owner.name} that {sorted(strangers)} own"
            )
        for here, there, size in batch:
            mine = op.initiator.cache.memory[here : here + size]
            theirs = op.target.cache.memory[there : there + size]
            if writes:
                theirs[:] = mine
            else:
                mine[:] = theirs
        if batch and self.fabric.climate.corrupts and op.rng.random() < self.fabric.climate.corrupts:
            here, there, _ = batch[0]
            memory, at = (op.target.cache.memory, there) if writes else (op.initiator.cache.memory, here)
            memory[at] ^= 0x40
