"""An instance under test face to face with scripted peers, and its transfers step by step.

`Facing` is one transfer of it in one of its four roles, which can be
brought to any step of the protocol and from there to its good end. When an encounter is over, everything is
looked at: each transfer was reported once, no block was touched that was not handed out, and a good peer is
served in every way that the transport declares.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from attrs import define, evolve, field

from kvx.core import wire
from kvx.core.errors import KvxError
from kvx.core.events import OpDone
from kvx.core.messages import Ack, Command, Done, GrantMessage, Renew
from kvx.core.model import (
    BlockTable,
    Grant,
    InstanceInfo,
    Mode,
    Op,
    Outcome,
    Part,
    Reason,
    Role,
    Side,
    Stamp,
)
from kvx_conformance.suite.case import Context, Finding
from kvx_conformance.suite.line import Line
from kvx_conformance.suite.scripted import SHAPE, ScriptedPeer
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.toy_under_test import BLOCKS, TOKENS, Toy

LIMIT_S = 8.0
"""How long anything may take that has to happen at all and that no bound of the instance decides."""
LINGER_S = 0.03
"""How long a case waits for what must not come."""
CUT = 32
"""Where a prompt that is handed over in two parts is cut."""
_TURN_S = 0.002
_CONTENT = 7


class Step(Enum):
    """How far a transfer has come."""

    EXPOSED = "exposed"  # a target has offered its blocks; at an initiator: before its grant
    GRANTED = "granted"
    MOVING = "moving"  # half of the bytes are there
    SETTLING = "settling"  # all of them, and Done was said
    OVER = "over"


class Encounter:
    """One instance, its toy engine, and any number of scripted peers. `Encounter.of` has them until the case ends."""

    def __init__(self, context: Context, *, key: str = "", epoch: int | None = None, **options: Any) -> None:
        self.context = context
        self.peers: list[ScriptedPeer] = []
        self.key = key
        self.options = options
        self.toys: list[Toy] = []
        self.begin(secrets.randbits(63) if epoch is None else epoch)

    @property
    def toy(self) -> Toy:
        return self.toys[-1]

    def begin(self, epoch: int) -> Toy:
        """Start the instance, for the first time or once more beside the first."""
        try:
            self.toys.append(Toy.open(self.context, "toy", self.key, epoch, self.options))
        except KvxError as error:
            raise Finding(f"the instance does not begin: {error}") from error
        return self.toy

    def peer(self, name: str = "peer", **more: Any) -> ScriptedPeer:
        facts: dict[str, Any] = {"key": self.key.encode(), **more}
        made = ScriptedPeer(self.context, self.until, name, **facts)
        self.peers.append(made)
        return made

    def facing(self, transfer: str, mode: Mode, side: Side, peer: ScriptedPeer | None = None) -> Facing:
        """A transfer with the instance on this side of it; by default with a peer of its own."""
        return Facing(self, transfer, mode, side, peer or self.peer(f"peer-of-{transfer}"))

    def modes(self) -> list[Mode]:
        """The modes whose operation the transport declares."""
        present = self.context.features
        return [mode for mode, need in ((Mode.PUSH, Feature.WRITE), (Mode.PULL, Feature.READ)) if need in present]

    def everywhere(self, *steps: Step, sides: Iterable[Side] = tuple(Side)) -> Iterator[Facing]:
        """A transfer at each of these steps, in each role that the transport declares; each with a peer of its own.

        A target is over when it has heard Done, and what a push exposes is granted at once: these steps are none.
        """
        for mode, side in self.roles():
            none = {Step.SETTLING, Step.GRANTED} if mode is Mode.PUSH else {Step.SETTLING}
            for step in steps:
                if side in sides and not (side is Side.TARGET and step in none):
                    yield self.facing(f"{mode.value}-{side.value}-{step.value}", mode, side).to(step)

    def roles(self) -> list[tuple[Mode, Side]]:
        return [(mode, side) for mode in self.modes() for side in Side]

    def command(self, verb: str, argument: str = "", changes: Mapping[str, Any] | None = None) -> Ack:
        """What a router or operator says, on a connection of its own, and the answer.

        `changes` are of what its proof covers.
        """
        line = self.peer(f"router-{len(self.peers)}", epoch=0).dial(self.toy.info.address).greet(2)
        nonce = secrets.token_bytes(16)
        covers: dict[str, Any] = {"challenge": line.their_nonce, "verb": verb, "argument": argument, "nonce": nonce}
        covers |= changes or {}
        proof = wire.command_proof(covers.pop("key", line.peer.key), **covers)
        line.say(Command(verb, argument, nonce, proof))
        return line.hear(Ack, nonce.hex())

    # --------------------------------------------------------------------- waiting

    def serve(self, wait_s: float = _TURN_S) -> None:
        poller = select.poll()
        for peer in self.peers:
            for line in peer.lines:
                if not line.ended:
                    poller.register(line.sock, select.POLLIN)
        poller.poll(wait_s * 1000)
        for toy in self.toys:
            toy.serve()
        for peer in self.peers:
            peer.serve()

    def until(self, holds: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        """Serve everybody until it holds. Raises Finding if it does not come to hold."""
        end = time.monotonic() + limit_s * self.context.pace
        while not holds():
            if time.monotonic() > end:
                raise Finding(f"{what}: not within {limit_s * self.context.pace:g} s; {self.story()}")
            self.serve()

    def linger(self, wait_s: float = LINGER_S) -> None:
        """Serve for a while, for what must not come."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            self.serve()

    def story(self) -> str:
        """What was said lately, for whoever reads of a failure."""
        told = [
            f"{transfer} {'ok' if news.ok else f'failed ({news.reason}: {news.detail})'}"
            for transfer, all_news in list(self.toy.told.items())[-4:]
            for news in all_news
            if isinstance(news, Outcome)
        ]
        said = [f"{line.peer.peer} heard {line.story()}" for peer in self.peers[-3:] for line in peer.lines[-2:]]
        return f"the engine was told: {', '.join(told) or 'nothing'}; {'; '.join(said)}"

    def outcome(self, transfer: str, limit_s: float = LIMIT_S) -> Outcome:
        """The one Outcome of this transfer, waited for."""
        self.until(lambda: self.toy.outcomes(transfer), f"the engine is told the outcome of {transfer}", limit_s)
        return self.toy.outcomes(transfer)[0]

    def fails(self, transfer: str, *reasons: Reason, limit_s: float = LIMIT_S, released: bool = True) -> Outcome:
        """It fails for one of these reasons, if any are given, and its blocks are released."""
        outcome = self.outcome(transfer, limit_s)
        self.context.check(not outcome.ok, f"{transfer} counts as done, but it has to fail")
        if reasons:
            due = " or ".join(reason.value for reason in reasons)
            self.context.check(
                outcome.reason in reasons,
                f"{transfer} fails with {outcome.reason} ({outcome.detail}); due is {due}",
            )
        if released:
            self.until(lambda: self.toy.released(transfer), f"the blocks of {transfer} are released")
        return outcome

    # ----------------------------------------------------------------------- the end

    def intact(self) -> None:
        """Nothing has happened that must never happen."""
        for toy in self.toys:
            toy.serve()
            flaws = toy.flaws()
            self.context.check(not flaws, "; ".join(flaws))

    def over(self, *, kept: Iterable[str] = ()) -> None:
        """The end: all blocks but `kept` are back, nothing is told twice, and good peers are served."""
        due = set(kept)
        self.until(lambda: set(self.toy.kept()) <= due, f"all blocks but those of {sorted(due)} are released")
        self.serves()
        self.linger()
        self.intact()

    def serves(self) -> None:
        """A good peer is served in each role that the transport declares."""
        good = self.peer(f"good-{len(self.peers)}")
        for mode, side in self.roles():
            self.facing(f"good-{mode.value}-{side.value}-{len(self.peers)}", mode, side, good).well()


@define(eq=False)
class Facing:
    """One transfer between the instance, on `side`, and a scripted peer that behaves unless a case says otherwise."""

    encounter: Encounter
    transfer: str
    mode: Mode
    side: Side
    peer: ScriptedPeer
    step: Step | None = None
    claimed: bool = True
    """A producer's engine says Claim before its blocks."""
    permits: bool = True
    """The peer's transport lets the instance in before it has its grant."""
    start: int = 0
    """What the instance exposes begins at this token."""
    lease_s: float | None = None
    """Of the target's grant; by default longer than any case."""
    altered: Mapping[str, Any] = field(factory=dict)
    """Further changes of the peer's grant."""
    theirs: InstanceInfo = field(init=False)
    grant: Grant = field(init=False)
    mine: BlockTable = field(init=False)
    """The peer's blocks."""
    _line: Line | None = None

    @property
    def line(self) -> Line:
        assert self._line is not None
        return self._line

    @line.setter
    def line(self, line: Line) -> None:
        self._line = line

    @property
    def role(self) -> Role:
        """The peer's."""
        produces = (self.mode is Mode.PUSH) is (self.side is Side.TARGET)
        return Role.PRODUCER if produces else Role.CONSUMER

    @property
    def bound(self) -> bool:
        """The instance knows that this peer takes part: it dialled it, or has accepted a word about the transfer."""
        return not self.dialled_by_peer or self.step is not Step.EXPOSED

    @property
    def op(self) -> Op:
        return Op.WRITE if self.mode is Mode.PUSH else Op.READ

    @property
    def producer(self) -> str:
        return self.peer.peer.instance if self.role is Role.PRODUCER else self.encounter.toy.name

    # ------------------------------------------------------------------------ steps

    def to(self, step: Step) -> Facing:
        """Bring it to this step, from wherever it is."""
        order = list(Step)
        target = self.side is Side.TARGET
        while self.step is None or order.index(self.step) < order.index(step):
            done = -1 if self.step is None else order.index(self.step)
            reach = order[done + 1]
            (self._target if target else self._initiator)(reach)
            self.step = reach
        return self

    def well(self) -> None:
        """Bring it to its good end, which counts as a check."""
        self.to(Step.OVER)

    def connect(self) -> Line:
        """A line between the two, greeted: the one there is, or one that the active side opens."""
        toy = self.encounter.toy
        usable = [line for line in self.peer.lines if line.info is not None and not line.ended]
        if usable and (self.dialled_by_peer or any(not line.dialler for line in usable)):
            self._line = usable[-1]
        else:
            self._line = self.peer.dial(toy.info.address) if self.dialled_by_peer else self.peer.accept()
            self._line.greet()
        self.theirs = self.peer.learn(self._line)
        return self._line

    @property
    def dialled_by_peer(self) -> bool:
        """Which side opens the first line: whoever has the other's address from the request."""
        return (self.mode is Mode.PUSH) is not (self.side is Side.TARGET)

    def call(self, do: str, **more: Any) -> None:
        """The toy's engine says something of this transfer."""
        facts: dict[str, Any] = {"producer": self.producer, **more}
        self.encounter.toy.call(do, self.transfer, self.mode, **facts)

    def abort(self, reason: Reason = Reason.ABORTED) -> None:
        self.call("abort", reason=reason)

    # ------------------------------------------------------- the instance as a target

    def _target(self, step: Step) -> None:
        match step:
            case Step.EXPOSED:
                self._offer()
            case Step.GRANTED:
                if self.mode is Mode.PULL:
                    self.line.say(Renew((self.transfer,)))
            case Step.MOVING:
                self.carry(0, CUT)
            case Step.SETTLING:
                self.carry(CUT, TOKENS)
                self.say_done()
            case Step.OVER:
                self._accepted()

    def _offer(self) -> None:
        """The engine exposes; the peer has the grant, which came by message or as a ticket, and blocks for it."""
        push = self.mode is Mode.PUSH
        self.call("expose", address=self.peer.address if push else None, start=self.start, lease_s=self.lease_s)
        self.mine = self.peer.take(BLOCKS)
        if not push:
            self.grant = self.encounter.toy.ticket(self.transfer, self.lease_s).grant
        line = self.connect()
        if push:
            self.grant = line.hear(GrantMessage, self.transfer).grant
            self.peer.cache.fill(_CONTENT, (0,), self.mine, None)

    def carry(self, start: int, stop: int) -> None:
        """Move the blocks from token `start` to `stop` by hand; it has to work."""
        ended = self.peer.moved(self.theirs, self.op, *self._parts(start, stop), self.stamp)
        if not isinstance(ended, OpDone):
            raise Finding(f"a permitted {self.op.value} of {self.transfer} fails: {ended.detail}")

    def _parts(self, start: int, stop: int) -> tuple[Part, Part]:
        low, high = start // SHAPE.block_size, -(-stop // SHAPE.block_size)
        mine = Part(None, (low,), BlockTable.of(self.mine.groups[0][low:high]))
        return mine, Part(None, self.grant.first, self.grant.blocks)

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.transfer, self.grant.epoch, self.grant.generation)

    def write_late(self) -> bool:
        """Try to move all of it although that is over; whether the transport says that it worked."""
        ended = self.peer.moved(self.theirs, self.op, *self._parts(0, TOKENS), self.stamp)
        return isinstance(ended, OpDone)

    def say_done(self, **changes: Any) -> None:
        self.line.say(self.peer.done(self.transfer, self.theirs, self.role, **changes))

    def _accepted(self) -> None:
        check = self.encounter.context.check
        ack = self.line.hear(Ack, self.transfer)
        check(ack.ok, f"Done of {self.transfer} is answered Ack(false): {ack.reason}: {ack.detail}")
        self._ends_well()
        if self.mode is Mode.PULL:
            wrong = self.peer.cache.flaws(_CONTENT, (0,), self.mine, TOKENS)
            check(not wrong, f"the reader has wrong bytes: {wrong}")

    # --------------------------------------------------- the instance as an initiator

    def _initiator(self, step: Step) -> None:
        match step:
            case Step.EXPOSED:
                self._ask()
            case Step.GRANTED:
                self._give()
            case Step.MOVING:
                self.stage(0, CUT, last=False)
                self.encounter.until(self._half, f"the first part of {self.transfer} is moved")
            case Step.SETTLING:
                self.stage(CUT, TOKENS)
                self.hear_done()
            case Step.OVER:
                self.line.say(Ack(self.transfer, True))
                self._ends_well()

    def _ask(self) -> None:
        """The engine claims, and the two are connected."""
        self.mine = self.peer.take(BLOCKS)
        grant = self.peer.grant(
            self.transfer, self.mode, self.mine, TOKENS, lease_s=60.0 if self.lease_s is None else self.lease_s
        )
        self.grant = evolve(grant, **self.altered)
        if self.mode is Mode.PUSH:
            if self.claimed:
                self.call("claim")
            self.connect()
        else:
            self.peer.cache.fill(_CONTENT, (0,), self.mine, None)
            self.call("claim", ticket=self.peer.ticket(self.grant))
            self.connect()
            if self.permits:
                self.peer.permit(self.grant, self.theirs)

    def _give(self) -> None:
        if self.mode is Mode.PUSH:
            if self.permits:
                self.peer.permit(self.grant, self.theirs)
            self.line.say(self.peer.granting(self.grant, self.theirs))
            self.line.barrier()
        else:
            self.line.hear(Renew, self.transfer)

    def stage(self, start: int, stop: int, *, last: bool = True) -> None:
        ticket = self.peer.ticket(self.grant) if self.mode is Mode.PULL else None
        self.call("stage", start=start, stop=None if last else stop, last=last, ticket=ticket)

    def _half(self) -> bool:
        """Whether the first part has reached its destination; asked of the memory, not of the instance."""
        cut = CUT // SHAPE.block_size
        if self.mode is Mode.PUSH:
            return not self.peer.cache.flaws(_CONTENT, (0,), BlockTable.of(self.mine.groups[0][:cut]), CUT)
        toy = self.encounter.toy.actor
        blocks = BlockTable.of(toy.jobs[self.transfer].blocks[:cut])
        return not toy.cache.flaws(_CONTENT, (0,), blocks, CUT)

    def hand_over(self) -> None:
        """An initiator's engine hands over the rest of its blocks: without its last part nothing is released."""
        if self.side is Side.INITIATOR and self.step not in (Step.SETTLING, Step.OVER):
            self.stage(CUT if self.step is Step.MOVING else 0, TOKENS)

    def hear_done(self) -> Done:
        """Done comes, and all bytes were there before it."""
        done = self.line.hear(Done, self.transfer)
        check = self.encounter.context.check
        due = self.peer.done(self.transfer, self.theirs, self.role)
        check((done.legs, done.first, done.plan) == (due.legs, due.first, due.plan), f"{done} came; due is {due}")
        if self.mode is Mode.PUSH:
            wrong = self.peer.cache.flaws(_CONTENT, (0,), self.mine, TOKENS)
            check(not wrong, f"Done came before the bytes: {wrong}")
        return done

    # ------------------------------------------------------------------------- ends

    def reconnect(self) -> Line:
        """A new line after the old one has broken, opened by whoever opened that one."""
        if self.line.dialler:
            self._line = self.peer.dial(self.encounter.toy.info.address).greet()
        else:
            self._line = self.peer.accept().greet()
        return self._line

    def _ends_well(self) -> None:
        encounter, check = self.encounter, self.encounter.context.check
        outcome = encounter.outcome(self.transfer)
        check(outcome.ok, f"{self.transfer} fails: {outcome.reason}: {outcome.detail}")
        encounter.until(lambda: encounter.toy.released(self.transfer), f"the blocks of {self.transfer} are released")
        right = encounter.toy.actor.jobs[self.transfer].right
        check(right is not False, f"{self.transfer} counts as done, and its bytes are wrong")
