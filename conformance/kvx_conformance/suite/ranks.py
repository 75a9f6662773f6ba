"""The rig of the transport cases: ranks in this process, polled only when a case says so.

Whatever a transport raises is a Finding that names the call, and so is an end that is told twice,
or told of an operation that was never posted. When a case is over, all memory is looked at again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from attrs import define, field, frozen

from kvx.core.errors import KvxError, TransportError
from kvx.core.events import Fenced, Forbidden, OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Layout, Op, Peer, Reason, Stamp
from kvx.transport import Completion, Transport
from kvx_conformance.suite.case import Context, Finding, NotExercised
from kvx_conformance.suite.ground import MIB, Bytes, Ground
from kvx_conformance.suite.ops import some_op

LIMIT_S = 8.0
"""How long anything may take that has to happen at all."""
CLOSE_S = 2.0
"""How long `close` may take."""
LINGER_S = 0.02
"""How long a case waits for what must not come any more."""
REST_S = 0.5
WAKES = 20
"""So often may a transport at rest ask to be polled in REST_S; a spinning one does so thousands of times."""
_TURN_S = 0.05
KIB = 1 << 10
EPOCH = 7
"""Of every first start; a restart has the next one."""
STAMP = Stamp("t", EPOCH, 3)
SIZES = (8 * MIB, 32 * MIB, 128 * MIB)
"""Bytes of an operation that has to be caught in its midst: a faster transport needs a larger one."""
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
"""Turns of the rig after which something interferes with an operation: from before its first byte to after its end."""


class Party(Protocol):
    """A rank, wherever it runs."""

    peer: Peer
    ground: Ground

    @property
    def info(self) -> InstanceInfo: ...

    def metadata(self) -> bytes: ...

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None: ...


def describe(peer: Peer, epoch: int) -> InstanceInfo:
    """What a handshake would have told of a rank."""
    return InstanceInfo(peer.instance, peer.rank, epoch, "127.0.0.1:1", Layout("m", "d", "v", (), 0))


@define(eq=False)
class Rank:
    """One transport, its memory, and what its `poll` has told."""

    peer: Peer
    epoch: int
    ground: Ground
    transport: Transport
    told: list[Completion] = field(factory=list)
    posted: set[int] = field(factory=set)
    ended: dict[int, OpDone | OpFailed] = field(factory=dict)
    closed: bool = False
    close_s: float = CLOSE_S
    """How long `close` may take, on this machine."""
    _poll_due: float = 0.0

    @property
    def info(self) -> InstanceInfo:
        return describe(self.peer, self.epoch)

    @property
    def answers(self) -> list[Forbidden | Fenced]:
        return [one for one in self.told if isinstance(one, Forbidden | Fenced)]

    @property
    def in_flight(self) -> int:
        return len(self.posted) - len(self.ended)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the transport. Whatever it raises is a Finding."""
        try:
            return getattr(self.transport, name)(*arguments)
        except Exception as error:
            raise self._raised(name, error) from error

    def refusal(self, name: str, *arguments: Any) -> str:
        """Call what the transport may refuse with TransportError: its text, empty if it does not refuse."""
        try:
            getattr(self.transport, name)(*arguments)
        except TransportError as error:
            return str(error) or "TransportError"
        except Exception as error:
            raise self._raised(name, error) from error
        return ""

    def value(self, name: str) -> Any:
        """A property of the transport."""
        try:
            return getattr(self.transport, name)
        except Exception as error:
            raise self._raised(name, error) from error

    def _raised(self, name: str, error: Exception) -> Finding:
        return Finding(f"{self.peer}: `{name}` raised {type(error).__name__}: {error}")

    def metadata(self) -> bytes:
        made = self.call("metadata")
        if not isinstance(made, bytes):
            raise Finding(f"{self.peer}: `metadata` gave {type(made).__name__}, no bytes")
        return made

    def learn(self, other: Party) -> None:
        self.call("connect", other.info, other.metadata())

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        self.call("permit", transfer, peer, op, ranges, stamp)

    def post(self, to: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp = STAMP) -> int:
        """Start an operation; returns its id."""
        op_id = len(self.posted) + 1
        self.posted.add(op_id)
        self.call("post", op_id, to, op, local, remote, stamp)
        return op_id

    def poll(self) -> list[Completion]:
        """What the transport tells now, each end once and only of what was posted."""
        told = self.call("poll")
        if not isinstance(told, list):
            raise Finding(f"{self.peer}: `poll` gave {type(told).__name__}, no list")
        for one in told:
            if isinstance(one, OpDone | OpFailed):
                self._end(one)
            elif not isinstance(one, Forbidden | Fenced):
                raise Finding(f"{self.peer}: `poll` told {one!r}, which is no completion")
        self.told += told
        return told

    def _end(self, one: OpDone | OpFailed) -> None:
        if one.op_id not in self.posted:
            raise Finding(f"{self.peer}: told {one}, but no operation {one.op_id} was posted")
        if one.op_id in self.ended:
            raise Finding(f"{self.peer}: operation {one.op_id} ended twice: {self.ended[one.op_id]}, then {one}")
        if isinstance(one, OpFailed) and type(one.reason) is not Reason:
            raise Finding(f"{self.peer}: operation {one.op_id} failed for {one.reason!r}, which is no Reason")
        self.ended[one.op_id] = one

    def fileno(self) -> int | None:
        number: Any = self.call("fileno")
        if number is not None and (not isinstance(number, int) or number < 0):
            raise Finding(f"{self.peer}: `fileno` gave {number!r}, no descriptor")
        return None if number is None else int(number)

    def poll_if_due(self, ready: bool) -> bool:
        """What the runtime does: poll when the descriptor says so, or when `idle_poll_s` is over. Was it polled?"""
        pause_s = self.value("idle_poll_s")
        due = ready or (pause_s is not None and time.monotonic() >= self._poll_due)
        if due:
            self._poll_due = time.monotonic() + (pause_s or 0.0)
            self.poll()
        return due

    def close(self) -> None:
        began = time.monotonic()
        self.closed = True
        self.call("close")
        took = time.monotonic() - began
        if took > self.close_s:
            raise Finding(f"{self.peer}: `close` returned after {took:.1f} s; {self.close_s:g} s are allowed")


@frozen(eq=False)
class Move:
    """An operation that was posted, and the bytes that its source had then."""

    initiator: Rank
    target: Party
    op: Op
    local: Descriptors
    remote: Descriptors
    op_id: int
    payload: Bytes

    @property
    def ground(self) -> Ground:
        """Where the bytes go."""
        return self.target.ground if self.op is Op.WRITE else self.initiator.ground

    @property
    def pieces(self) -> Descriptors:
        """The pieces there."""
        return self.remote if self.op is Op.WRITE else self.local

    @property
    def end(self) -> OpDone | OpFailed | None:
        return self.initiator.ended.get(self.op_id)

    @property
    def done(self) -> bool:
        return isinstance(self.end, OpDone)

    @property
    def begun(self) -> bool:
        """Has its destination begun to change?"""
        return self.ground.touched(self.pieces)

    def landed(self) -> Bytes:
        return self.ground.with_bytes(self.pieces, self.payload)


class Rig:
    """The ranks of one case. `Rig.of(context)` has them until the case ends."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.ranks: list[Rank] = []
        self.grounds: dict[str, Ground] = {}
        self.watched: set[int] = set()
        """Further descriptors that end a wait."""

    @classmethod
    def of(cls, context: Context) -> Rig:
        return context.enter(_rig(context))

    # ------------------------------------------------------------------ ranks

    def rank(self, name: str, *sizes: int, epoch: int = EPOCH, ground: Ground | None = None) -> Rank:
        """A rank with filled and registered memory that knows nobody."""
        made = self.bare(name, *sizes, epoch=epoch, ground=ground)
        made.ground.fill(self.context.rng.randrange(1 << 20))
        made.call("register", made.ground.regions())
        self.grounds[f"{name} (rank {len(self.ranks)} of this case)"] = made.ground
        return made

    def bare(self, name: str, *sizes: int, epoch: int = EPOCH, ground: Ground | None = None) -> Rank:
        """A rank whose memory is not registered yet."""
        peer = Peer(name, 0)
        try:
            transport = self.context.subject.make_transport(str(peer))
        except KvxError as error:
            raise Finding(f"{peer}: no transport can be made: {error}") from error
        except Exception as error:
            raise Finding(f"{peer}: the factory raised {type(error).__name__}: {error}") from error
        made = Rank(peer, epoch, ground or Ground(sizes or (MIB,)), transport, close_s=CLOSE_S * self.context.pace)
        self.ranks.append(made)
        return self.ranks[-1]

    def pair(self, *sizes: int, warm: bool = False) -> tuple[Rank, Rank]:
        """Two ranks that know each other and, if `warm`, have exchanged something before."""
        a, b = self.rank("a", *sizes), self.rank("b", *sizes)
        introduce(a, b)
        if warm:
            self.warm(a, b)
        return a, b

    def warm(self, a: Rank, b: Rank) -> None:
        op, piece, stamp = some_op(self.context), Descriptors.of([(0, 0, 64)]), Stamp("warm", EPOCH, 3)
        move = self.post(a, b, op, piece, piece, stamp=stamp)
        self.finish(move)

    # ---------------------------------------------------------------- turning

    def turn(self, *ranks: Rank, times: int = 1) -> None:
        """Poll each of these (by default all) once, whether or not it has asked for it."""
        for _ in range(times):
            for rank in ranks or self.ranks:
                if not rank.closed:
                    rank.poll()

    def serve(self, *ranks: Rank, wait_s: float = _TURN_S, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until one of these (by default all) asks to be polled, and poll those that do until it is enough."""
        open_ranks = [rank for rank in ranks or self.ranks if not rank.closed]
        numbers = [rank.fileno() for rank in open_ranks]
        pauses = [rank.value("idle_poll_s") for rank in open_ranks]
        poller = select.poll()
        for descriptor in {number for number in numbers if number is not None} | self.watched:
            poller.register(descriptor, select.POLLIN)
        limit_s = min([wait_s, *(pause for pause in pauses if pause is not None)])
        ready = {number for number, _ in poller.poll(max(0.0, limit_s) * 1000)}
        for rank, number in zip(open_ranks, numbers, strict=True):
            if rank.poll_if_due(number in ready) and enough():
                return

    def until(
        self, happens: Callable[[], bool], what: str, *ranks: Rank, limit_s: float = LIMIT_S, turn_s: float = _TURN_S
    ) -> None:
        """Serve these (by default all), looking each `turn_s`, until it happens. Raises Finding if it does not."""
        end = time.monotonic() + limit_s * self.context.pace
        while not happens():
            if time.monotonic() > end:
                self.turn(*ranks)
                why = "; `poll` had it, but `fileno` did not say so" if happens() else ""
                raise Finding(f"{what}: not within {limit_s * self.context.pace:g} s{why}")
            self.serve(*ranks, wait_s=turn_s, enough=happens)

    def linger(self, *ranks: Rank, wait_s: float = LINGER_S) -> None:
        """Serve for a while, for what must not come."""
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0:
            self.serve(*ranks, wait_s=min(left, _TURN_S))

    def rests(self, rank: Rank) -> None:
        """It asks to be polled a few times at most while it has nothing to do."""
        number = rank.fileno()
        if number is None:
            pause_s = rank.value("idle_poll_s")
            self.context.check(pause_s and pause_s > 0, "without `fileno` there must be an `idle_poll_s`")
            return
        poller = select.poll()
        poller.register(number, select.POLLIN)
        wakes, end = 0, time.monotonic() + REST_S
        while (left := end - time.monotonic()) > 0 and wakes <= WAKES:
            if poller.poll(left * 1000):
                wakes += 1
                rank.poll()
        self.context.check(wakes <= WAKES, f"{rank.peer} asked to be polled {wakes} times in {REST_S:g} s of rest")

    # ----------------------------------------------------------------- moving

    def post(
        self,
        initiator: Rank,
        target: Party,
        op: Op,
        local: Descriptors,
        remote: Descriptors,
        *,
        stamp: Stamp = STAMP,
        permit: bool = True,
    ) -> Move:
        """Permit (unless that was done) and post one operation whose pieces are good ones."""
        if permit:
            target.permit(stamp.transfer, initiator.peer, op, remote, stamp)
        payload = initiator.ground.take(local) if op is Op.WRITE else target.ground.take(remote)
        op_id = initiator.post(target.peer, op, local, remote, stamp)
        return Move(initiator, target, op, local, remote, op_id, payload)

    def ended(self, *moves: Move) -> None:
        """Serve all ranks until these have ended, well or not."""
        self.until(lambda: all(move.end is not None for move in moves), f"{_names(moves)} ends")

    def finish(self, *moves: Move) -> None:
        """Serve until these are done; at that very moment all bytes, and no others, must be in their place."""
        self.ended(*moves)
        for move in moves:
            self.good(move)
        self.intact("when the operation was done")

    def good(self, move: Move) -> None:
        """It is done and counts its bytes; from now on they are due."""
        self.context.check(move.done, f"{_names([move])} is a good one and ended as {move.end}")
        move.ground.due = move.landed()

    def midway(self, op: Op, least: int = SIZES[0]) -> Move:
        """An operation of at least so many bytes on a new pair, whose first bytes have landed and that has not ended.

        Raises NotExercised.
        """
        for size in [size for size in SIZES if size >= least]:
            a, b = self.pair(size, warm=True)
            move = self.post(a, b, op, a.ground.whole(), b.ground.whole())
            self.begins(move, a, b)
            if move.end is None:
                return move
            self.good(move)
            self.discard(a, b)
        raise NotExercised("even the largest operation was over before its middle could be seen")

    def begins(self, move: Move, *ranks: Rank) -> None:
        """Serve until its first bytes have landed, which a fast transport does long before it tells anything."""
        self.until(lambda: move.begun or move.end is not None, f"{_names([move])} begins", *ranks, turn_s=0.001)

    def rank_of(self, party: Party) -> Rank:
        """The rank of this process that it is."""
        return next(rank for rank in self.ranks if rank is party)

    def discard(self, *ranks: Rank) -> None:
        """Close ranks whose part in the case is over."""
        for rank in ranks:
            rank.close()

    # --------------------------------------------------------------- the oracle

    def intact(self, when: str, *grounds: Ground) -> None:
        """This memory, by default all, is what is due."""
        for name, ground in self.grounds.items():
            flaw = ground.flaw() if not grounds or ground in grounds else ""
            self.context.check(not flaw, f"memory of {name}: {flaw}, {when}" if flaw else "")

    def partial(self, move: Move, when: str) -> None:
        """Each byte of the destination is its old or its new one, and no other has changed; then this is due."""
        flaw = move.ground.flaw(move.landed())
        self.context.check(not flaw, f"destination of {_names([move])}: {flaw}, {when}" if flaw else "")
        move.ground.due[:] = move.ground.memory

    def unseen(self, move: Move, when: str) -> None:
        """A reader has not seen what its source has become. Whatever else stands in its destination (a frame that was
        begun has to be filled) is an operation's that has failed.
        """
        assert move.op is Op.READ
        ground, source = move.ground, move.target.ground.take(move.remote)
        there = ground.look(move.local)
        seen = int(np.count_nonzero((there == source) & (there != move.payload)))
        # By chance one byte in 256 is the same.
        context, limit = self.context, max(64, len(there) // 64)
        context.check(seen < limit, f"{seen} bytes of what the source became were read, {when}")
        ground.due[:] = ground.memory

    def poison(self, ground: Ground) -> None:
        """The owner of this memory uses it for something else: nothing may change it any more."""
        ground.fill(self.context.rng.randrange(1 << 20, 1 << 21))


@contextmanager
def _rig(context: Context) -> Generator[Rig]:
    rig = Rig(context)
    try:
        yield rig
        rig.linger()
        flaws = [(name, ground.flaw()) for name, ground in rig.grounds.items()]
    finally:
        broken = _close(rig)
    flaws += [(name, ground.flaw()) for name, ground in rig.grounds.items()]
    for name, flaw in flaws:
        if flaw:
            raise Finding(f"memory of {name}: {flaw}, after the case")
    if broken:
        raise broken[0]


def _close(rig: Rig) -> list[Finding]:
    broken: list[Finding] = []
    for rank in rig.ranks:
        if not rank.closed:
            try:
                rank.close()
            except Finding as finding:
                broken.append(finding)
    return broken


def introduce(*ranks: Rank) -> None:
    """Let all of them know one another."""
    for rank in ranks:
        for other in ranks:
            if other is not rank:
                rank.learn(other)


def _names(moves: Sequence[Move]) -> str:
    first = moves[0]
    one = f"{first.op.value.upper()} {first.op_id} of {first.initiator.peer}"
    return one if len(moves) == 1 else f"{one} and {len(moves) - 1} others"
