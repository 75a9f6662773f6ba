"""Scenarios on simulated endpoints: the same steps as on real processes, with a virtual clock.

The endpoints are the real ones, as in `sim`; what a proxy does to bytes is done here to envelopes
and to pieces of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import define, field

from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.errors import RemoteProtocolError
from kvx.core.events import OpDone, OpFailed, Post
from kvx.core.legs import Limits
from kvx.core.model import (
    Access,
    Capabilities,
    FenceScope,
    Grant,
    InstanceInfo,
    Mode,
    Op,
    Peer,
    Reason,
    Role,
    Ticket,
)
from kvx_conformance.actor import JUNK, Actor, Call, Shape, holds, seed_of
from kvx_conformance.climate import Climate
from kvx_conformance.fabric import End, Fabric, Process, Wire
from kvx_conformance.oneside import OneSided, Operation, Pieces
from kvx_conformance.room import Note, streams
from kvx_conformance.scenarios import (
    DELAY_S,
    Act,
    Break,
    Performance,
    Plane,
    Scenario,
    Step,
    StuckError,
)

_PIECE_BYTES = 16 << 10
_STEP_S = 0.002


@define(eq=False)
class Moving:
    """A posted operation, moved piece by piece in order."""

    op: Operation
    left: Pieces
    cancelled: bool = False


@define(eq=False)
class Stage(Fabric):
    """A fabric in which nothing happens by chance, and a Break strikes as in `proxy`."""

    armed: list[Break] = field(factory=list)
    passed: dict[str, int] = field(factory=dict)
    held: set[Plane] = field(factory=set)
    lanes: set[int] = field(factory=set)
    waiting: list[Callable[[], None]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.transport = Scripted(self)

    # ------------------------------------------------------------------- control

    def _arrive(self, link: Wire, sender: End, data: bytes, sent_at: float) -> None:
        receiver = link.other(sender)
        if link.dead or receiver.gone:
            return
        if Plane.CONTROL in self.held or id(link) in self.lanes:
            self.waiting.append(partial(self._arrive, link, sender, data, sent_at))
            return
        kind = type(wire.decode(data).message).__name__
        struck = next((b for b in self.armed if (b.sender, b.on) == (sender.process.info.instance, kind)), None)
        if struck is None:
            super()._arrive(link, sender, data, sent_at)
            return
        self.armed.remove(struck)
        match struck.act:
            case Act.CUT | Act.TRUNCATE | Act.HALF_CLOSE:
                self.break_wire(link)
            case Act.DUPLICATE:
                super()._arrive(link, sender, data, sent_at)
                super()._arrive(link, sender, data, sent_at)
            case Act.LANE:
                self.lanes.add(id(link))
                self.waiting.append(partial(self._arrive, link, sender, data, sent_at))
            case _:
                self.hold(Plane.CONTROL, struck.act)
                self.waiting.append(partial(self._arrive, link, sender, data, sent_at))

    def hold(self, plane: Plane, act: Act) -> None:
        self.held.add(plane)
        if act is Act.DELAY:
            self.clock.after(DELAY_S, self.heal)

    def heal(self) -> None:
        self.held.clear()
        self.lanes.clear()
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()


@define(eq=False)
class Scripted(OneSided):
    """Operations that land in order, and break where the stage says so."""

    fabric: Stage
    moving: dict[tuple[int, int], Moving] = field(factory=dict)

    def post(self, process: Process, action: Post) -> None:
        pairs = zip(action.local.pieces(), action.remote.pieces(), strict=True)
        pieces = [
            (here[1] + at, there[1] + at, min(_PIECE_BYTES, here[2] - at))
            for here, there in pairs
            for at in range(0, here[2], _PIECE_BYTES)
        ]
        target = process.peers[action.peer]
        op = Operation(action.op_id, action.op, action.stamp.transfer, process, target, action, pieces)
        process.ops[op.op_id] = op
        moving = self.moving[(id(process), op.op_id)] = Moving(op, list(pieces))
        self.fabric.clock.after(_STEP_S, lambda: self._move(moving))

    def cancel(self, process: Process, op_id: int) -> None:
        moving = self.moving.get((id(process), op_id))
        if moving is not None and not moving.op.ended:
            moving.cancelled = True
            if moving.op.op is Op.READ:
                self._fail(moving.op, Reason.ABORTED, "cancelled")

    def _move(self, moving: Moving) -> None:
        """One step of one operation: its next pieces land, or something on the way forbids it."""
        op, again = moving.op, partial(self._move, moving)
        if op.ended or not op.initiator.alive:
            return
        if Plane.DATA in self.fabric.held:
            self.fabric.waiting.append(again)
        elif max(op.initiator.stalled_until, op.target.stalled_until) > self.fabric.clock.now:
            self.fabric.clock.after(0.05, again)
        elif not op.target.alive:
            self._fail(op, Reason.TRANSPORT, "the target is gone")
        elif refusal := self._refused(op, moving.left[:1]):
            self._fail(op, Reason.ABORTED, refusal)
        elif not self._strikes(moving):
            self._copy(op, moving.left[:1])
            del moving.left[:1]
            if moving.cancelled:
                self._fail(op, Reason.ABORTED, "cancelled")
            elif moving.left:
                self.fabric.clock.after(_STEP_S, again)
            elif not self._acknowledged(moving):
                self._land_all(op)

    def _strikes(self, moving: Moving) -> bool:
        """Whether a Break of the payload's sender takes this step."""
        op = moving.op
        source = (op.initiator if op.op is Op.WRITE else op.target).info.instance
        sent = self.fabric.passed[source] = self.fabric.passed.get(source, 0) + moving.left[0][2]
        return self._data_break(moving, source, sent)

    def _acknowledged(self, moving: Moving) -> bool:
        """Whether a Break of the other direction, where the acknowledgements are, takes the last step."""
        op = moving.op
        sink = (op.target if op.op is Op.WRITE else op.initiator).info.instance
        return self._data_break(moving, sink, 1 << 40)

    def _data_break(self, moving: Moving, sender: str, passed: int) -> bool:
        ripe = (b for b in self.fabric.armed if b.plane is Plane.DATA and b.sender == sender)
        struck = next((b for b in ripe if isinstance(b.on, int) and b.on < passed), None)
        if struck is None:
            return False
        self.fabric.armed.remove(struck)
        match struck.act:
            case Act.CUT | Act.TRUNCATE | Act.HALF_CLOSE:
                self._fail(moving.op, Reason.TRANSPORT, "connection lost")
            case Act.FLIP:
                self._copy(moving.op, moving.left[:1])
                here, there, _ = moving.left.pop(0)
                writes = moving.op.op is Op.WRITE
                memory = (moving.op.target if writes else moving.op.initiator).cache.memory
                memory[there if writes else here] ^= 0x10
                self.fabric.clock.after(_STEP_S, lambda: self._move(moving))
            case Act.LANE:  # an operation with a lane that stands still cannot end
                self.fabric.waiting.append(partial(self._move, moving))
            case _:
                self.fabric.hold(Plane.DATA, struck.act)
                self.fabric.waiting.append(partial(self._move, moving))
        return True

    def _land_all(self, op: Operation) -> None:
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        self.fabric.soon(op.rng, lambda: op.initiator.feed(OpDone(op.op_id, op.post.local.nbytes)))

    def _fail(self, op: Operation, reason: Reason, detail: str) -> None:
        op.ended = True
        op.initiator.ops.pop(op.op_id, None)
        self.fabric.soon(op.rng, lambda: op.initiator.feed(OpFailed(op.op_id, reason, detail)))


@define(eq=False)
class Rank:
    """One rank of a scenario's instance: what it runs on and what it does."""

    process: Process
    actor: Actor


class Play(Performance):
    """One scenario on simulated endpoints."""

    def __init__(self, scenario: Scenario, pace: float = 1.0, *, trace: Callable[[Note], None] | None = None) -> None:
        super().__init__(scenario, pace)
        access, fence = (Access.REGION, FenceScope.NONE) if scenario.region_access else (Access.GRANT, FenceScope.PEER)
        capabilities = Capabilities(frozenset(Op), access, fence, cancel=True)
        limits: dict[str, Any] = dict(self.limits)
        climate = Climate(capabilities, Limits(**limits), scenario.integrity, latency_s=0.001)
        self.stage = Stage(streams(1), climate, trace)
        self.ranks: dict[str, list[Rank]] = {}
        self.tickets: dict[str, Ticket] = {}

    def step(self, step: Step) -> None:
        self.stage.say(repr(step))
        super().step(step)

    def call(self, call: Call) -> None:
        consumer = call.role is Role.CONSUMER
        address = f"{call.producer}:7000" if consumer and call.mode is Mode.PUSH else None
        ticket = self.tickets[call.transfer] if consumer and call.mode is Mode.PULL else None
        lease_s = self.lease_s(call)
        for rank in self.ranks[call.who]:
            rank.process.feed(rank.actor.call(call, address=address, ticket=ticket, lease_s=lease_s))
        if (call.do, call.mode) == ("expose", Mode.PULL):
            self.tickets[call.transfer] = self._ticket(self.ranks[call.who][0], call, lease_s)

    def _ticket(self, rank: Rank, call: Call, lease_s: float) -> Ticket:
        info = rank.process.info
        first, blocks = rank.actor.table(call.transfer)
        owner = Peer(info.instance, 0)
        grant = Grant(
            call.transfer, owner, info.epoch, 0, Mode.PULL, (first,), blocks, call.tokens, lease_s, info.addresses[0]
        )
        return wire.make_ticket(grant, self.scenario.secrets.get(call.who, "").encode())

    # ---------------------------------------------------------------- instances

    def start(self, who: str) -> None:
        shape = self.scenario.shapes[who]
        epoch = self.stage.chance("epochs").getrandbits(63)
        addresses = tuple(f"{who}:{7000 + rank}" for rank in range(shape.ranks))
        self.ranks[who] = []
        for rank in range(shape.ranks):
            info = InstanceInfo(who, rank, epoch, addresses[rank], shape.layout(rank), ("sim",), addresses)
            self.ranks[who].append(self._rank(info, shape))

    def _rank(self, info: InstanceInfo, shape: Shape) -> Rank:
        endpoint = Endpoint(
            info,
            capabilities=lambda _: self.stage.climate.capabilities,
            entropy=self.stage.chance("entropy").randbytes,
            key=self.scenario.secrets.get(info.instance, "").encode(),
            limits=self.stage.climate.limits,
            integrity=self.scenario.integrity,
        )

        actor = Actor(shape, info.rank, seed_of(info.instance))
        process = Process(
            self.stage, info, endpoint, actor.cache, actor.pool, lambda _, news: actor.hear(news), 0.0, 1.0
        )
        self.stage.processes.append(process)
        self.stage.listeners[info.address] = process
        return Rank(process, actor)

    def signal(self, who: str, what: str) -> None:
        for rank in self.ranks[who]:
            match what:
                case "kill":
                    self.stage.kill(rank.process, vanishes=False)
                case "stop":
                    rank.process.stalled_until = float("inf")
                case "cont":
                    rank.process.stalled_until = self.stage.clock.now
                    rank.process.stall(0.0)

    def garbage(self, who: str) -> None:
        """What is not an envelope ends in the control channel, before any endpoint."""
        for junk in JUNK:
            try:
                wire.decode(junk)
            except RemoteProtocolError:
                continue
            raise AssertionError(f"hostile bytes for {who} were taken for an envelope: {junk!r}")

    # ------------------------------------------------------------------- faults

    def arm(self, what: Break) -> None:
        self.stage.armed.append(what)
        self.stage.passed.clear()

    def fired(self) -> None:
        self._until(lambda: not self.stage.armed, "a fault has not happened")

    def heal(self) -> None:
        self.stage.heal()

    # ------------------------------------------------------------------ looking

    def tell(self, who: str, transfer: str) -> list[dict[str, Any]]:
        return [rank.actor.row(transfer) for rank in self.ranks[who]]

    def end(self, who: str) -> tuple[list[str], bool]:
        ranks = self.ranks[who]
        flaws = [*self.stage.violations, *(flaw for rank in ranks for flaw in rank.actor.flaws())]
        return flaws, all(rank.actor.full for rank in ranks)

    def wait(self, who: str, condition: str, transfer: str) -> None:
        def met() -> bool:
            return all(
                holds(rank.actor, rank.process.endpoint.snapshot(), condition, transfer) for rank in self.ranks[who]
            )

        self._until(met, f"{who} has not come to {condition} {transfer}")

    def _until(self, met: Callable[[], bool], problem: str) -> None:
        end = self.stage.clock.now + self.limit_s
        while not met():
            if self.stage.clock.now >= end:
                raise StuckError(f"{self.scenario.id}: {problem} in {self.limit_s:g} s; rows so far: {self.rows}")
            self.stage.clock.step(end)
