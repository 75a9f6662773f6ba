"""The simulated transport: bytes that land late, in pieces, or not at all, and never after it said so (R14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from kvx.core.events import OpDone, OpFailed, Post
from kvx.core.model import Access, FenceScope, Op
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
        self.fabric.rng.shuffle(pieces)
        groups = self.fabric.rng.choice((1, 1, 2, 3))
        share = -(-len(pieces) // groups)
        moments = sorted(self.fabric.rng.expovariate(1 / self.fabric.climate.op_s) for _ in range(groups))
        fate = self.fabric.rng.random()
        climate = self.fabric.climate
        breaks_at = self.fabric.rng.randrange(groups + 1)
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
        self.fabric.clock.after(moments[-1] + self.fabric.delay(), lambda: self._finish(op))

    def _hang(self, op: Operation, rest: Pieces, moment: float) -> None:
        op.hung = True
        late = moment + self.fabric.rng.uniform(0.5, 4.0) * self.fabric.climate.limits.op_timeout_s
        self.fabric.clock.after(late, lambda: self._land(op, rest))
        self.fabric.clock.after(late + 0.01, lambda: self._finish(op))

    def cancel(self, process: Process, op_id: int) -> None:
        op = process.ops.get(op_id)
        if op is not None and self.fabric.rng.random() < 0.9:
            self.fabric.soon(lambda: self._end(op, "cancelled"))

    def _finish(self, op: Operation) -> None:
        if op.ended:
            return
        until = self.fabric.cut_until(op.initiator, op.target)
        if until is not None:
            self.fabric.clock.at(until + self.fabric.delay(), lambda: self._finish(op))
            return
        if op.pieces:
            self.fabric.clock.after(0.01, lambda: self._finish(op))
            return
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        op.initiator.feed(OpDone(op.op_id, op.post.local.nbytes))

    def _end(self, op: Operation, detail: str) -> None:
        """R14: from here on no byte lands."""
        if op.ended:
            return
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        self.fabric.soon(lambda: op.initiator.feed(OpFailed(op.op_id, detail=detail)))

    def _land(self, op: Operation, batch: Pieces) -> None:
        """Some bytes arrive, unless something on the way forbids it."""
        if op.ended:
            return
        source, target = op.initiator, op.target
        until = self.fabric.cut_until(source, target)
        if until is not None:
            if self.fabric.rng.random() < 0.3:
                self._end(op, "the network was cut")
            else:
                self.fabric.clock.at(until + self.fabric.delay(), lambda: self._land(op, batch))
            return
        if not target.alive:
            self._end(op, "the target is gone")
            return
        if not source.alive and (op.op is Op.READ or not self._echoes(source)):
            op.ended = True
            return
        refusal = self._refused(op, batch)
        if refusal:
            self._end(op, refusal)
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
        if batch and self.fabric.rng.random() < self.fabric.climate.corrupts:
            here, there, _ = batch[0]
            memory, at = (op.target.cache.memory, there) if writes else (op.initiator.cache.memory, here)
            memory[at] ^= 0x40
