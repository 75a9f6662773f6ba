"""The records that the endpoint keeps of open transfers, and what can be read off them.

A transfer has one leg per peer rank that it shares data with. Until the peer's layout is known
it has a single provisional leg without a peer, which `Transfer.meet` replaces by the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, evolve, field, frozen

from kvx.core import machine
from kvx.core.layout import Coverage, LegPlan, window
from kvx.core.machine import SETTLED, TERMINAL, State, Table
from kvx.core.model import (
    SIDE,
    Access,
    BlockTable,
    Capabilities,
    Descriptors,
    Grant,
    Layout,
    Mode,
    Part,
    Peer,
    Reason,
    Role,
    Side,
    Ticket,
)


@frozen
class Limits:
    """The bounds of every wait, in seconds, and of memory; the options of the same names."""

    patience_s: float = 120.0
    part_gap_s: float = 60.0
    op_timeout_s: float = 30.0
    drain_limit_s: float = 8.0
    grace_s: float = 10.0
    quarantine_s: float = 5.0
    transfer_max_s: float = 600.0
    keepalive_s: float = 2.0
    lost_s: float = 6.0
    ack_wait_s: float = 10.0
    handshake_s: float = 10.0
    lease_s: float = 30.0
    tombstones: int = 100_000
    transfers: int = 20_000


@define
class Leg:
    """One leg's present state; `until` is the deadline of the state itself."""

    peer: Peer | None
    state: State
    epoch: int = 0
    plan: LegPlan | None = None
    layout: Layout | None = None  # the peer's
    heard: tuple[int, ...] = ()  # the ranks of this instance that the peer has to hear from
    empty: bool = False
    grant: Grant | None = None  # initiator: what may be touched; target of a write: what was sent
    prompt: str = ""  # initiator of a write: the digest that came with the grant
    capabilities: Capabilities | None = None
    lease_until: float | None = None
    renew_at: float | None = None
    until: float | None = None
    address: str = ""  # where the peer's rank is dialled
    dead_since: float | None = None  # another epoch of the peer has come then
    next_part: int = 0
    ops: dict[int, float] = field(factory=dict)  # op id -> deadline
    early_since: float | None = None  # reader: the owner's engine has not exposed its blocks yet
    again_at: float | None = None  # when all that was staged is posted again
    nbytes: int = 0
    digest: str | None = None  # initiator: of what was moved; target: what Done named

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL


@define
class Transfer:
    """One transfer on this rank: what its engine gave, what it was told, and its legs."""

    id: str
    mode: Mode
    role: Role
    started: float
    legs: list[Leg]
    met: bool = False  # the legs are the real ones
    address: str | None = None  # whom to dial for the first contact
    instance: str | None = None  # the only instance that takes part; bound at first contact
    epoch: int | None = None
    ticket: Ticket | None = None
    own: Part | None = None  # target: the exposed blocks
    tokens: int = 0
    prompt: str = ""  # the digest of these tokens, where the engine has given one
    lease_s: float = 30.0
    parts: list[Part] = field(factory=list)  # initiator: what was staged
    coverage: Coverage | None = None
    last: bool = False
    last_part_at: float = 0.0
    patience_from: float = 0.0
    due: float = float("inf")  # when `lifecycle` looks at it next
    engaged: bool = False  # the engine called Claim, Expose or Stage: an Outcome is owed
    handed: bool = False  # the engine handed over blocks: Released is owed
    finished: bool = False  # the engine gave its last Stage, exposed, or aborted
    failed: tuple[Reason, str] | None = None
    reported: bool = False
    accepted: frozenset[tuple[Peer, int]] = frozenset()

    @property
    def side(self) -> Side:
        return SIDE[(self.mode, self.role)]

    @property
    def initiates(self) -> bool:
        return self.side is Side.INITIATOR

    def table(self, leg: Leg) -> Table:
        if self.initiates:
            return machine.INITIATOR
        if self.mode is Mode.PULL:
            return machine.TARGET_READ
        forbiddable = leg.capabilities is not None and leg.capabilities.access is Access.GRANT
        return machine.TARGET_WRITE_FORBIDDABLE if forbiddable else machine.TARGET_WRITE

    def leg_of(self, peer: Peer) -> Leg | None:
        return next((leg for leg in self.legs if leg.peer == peer), None)

    def open_legs(self) -> list[Leg]:
        return [leg for leg in self.legs if not leg.terminal]

    def meet(self, instance: str, epoch: int, ranks: Iterable[tuple[int, bool]]) -> None:
        """Replace the provisional leg by one per rank of the peer; (rank, shares no data)."""
        provisional = self.legs[0]
        self.legs = [
            evolve(provisional, peer=Peer(instance, rank), empty=empty, epoch=epoch, ops={}) for rank, empty in ranks
        ]
        self.met, self.instance, self.epoch = True, instance, epoch

    @property
    def settled(self) -> bool:
        """Nothing holds back the Outcome any more."""
        return all(leg.state in SETTLED for leg in self.legs)

    @property
    def over(self) -> bool:
        return all(leg.terminal for leg in self.legs)

    def owner_part(self, leg: Leg) -> Part:
        """Initiator: the blocks of the grant, as a part of the owner's side."""
        assert leg.grant is not None
        return Part(None, leg.grant.first, leg.grant.blocks)

    def move(self, leg: Leg, part: Part) -> tuple[Descriptors, Descriptors]:
        """(local, remote) descriptors of one staged part on one leg."""
        assert leg.plan is not None
        if self.role is Role.PRODUCER:
            return leg.plan.move(part, self.owner_part(leg))
        remote, local = leg.plan.move(self.owner_part(leg), part)
        return local, remote


def provisional(initiates: bool) -> Leg:
    return Leg(None, State.NEW if initiates else State.EXPOSED)


def first_moved(t: Transfer, leg: Leg) -> tuple[int, ...]:
    """Initiator, for `Done.first`: from where on it has moved, per group in the consumer's blocks.

    Not in the owner's blocks: where those are larger, a reader may begin in the middle of one.
    """
    assert leg.grant is not None and t.coverage is not None
    return leg.grant.first if t.mode is Mode.PUSH else t.coverage.first()


def moved(t: Transfer, leg: Leg, first: tuple[int, ...], own: Layout) -> tuple[Part, Part | None]:
    """Target, from `Done.first`: the part of its own blocks that was moved, and the reader's part."""
    assert t.own is not None and leg.layout is not None
    if t.mode is Mode.PUSH:
        return t.own, None
    here = window(first, leg.layout, own, t.tokens)
    groups = zip(t.own.blocks.groups, t.own.first, here, strict=True)
    tail = Part(None, here, BlockTable(tuple(blocks[max(0, start - low) :] for blocks, low, start in groups)))
    theirs = tuple(
        tuple(range(max(0, -(-t.tokens // group.block_size) - start)))
        for start, group in zip(first, leg.layout.groups, strict=True)
    )
    return tail, Part(None, first, BlockTable(theirs))


def misfit(t: Transfer, leg: Leg) -> tuple[Reason, str] | None:
    """Initiator: why nothing, or nothing more, may be moved for what both engines have said; or None."""
    assert leg.grant is not None
    if t.prompt and leg.prompt and t.prompt != leg.prompt:
        here, there = f"{t.tokens} tokens with digest {t.prompt}", f"{leg.grant.tokens} with {leg.prompt}"
        return Reason.PROMPT, f"another prompt: {here} here, {there} at the peer"
    problem = incomplete(t, leg) if t.last else None
    return (Reason.BOUNDS, problem) if problem else None


def incomplete(t: Transfer, leg: Leg) -> str | None:
    """What is missing although the last part is there: tokens, positions, gaps (R10); or None."""
    assert leg.grant is not None and leg.layout is not None and t.coverage is not None
    if t.tokens != leg.grant.tokens:
        return f"the prompt has {t.tokens} tokens here and {leg.grant.tokens} at the peer"
    covered, groups = t.coverage.first(), range(len(leg.grant.first))
    if t.mode is Mode.PUSH:
        need = window(leg.grant.first, leg.layout, t.coverage.layout, t.tokens)
        if any(covered[g] > need[g] for g in groups if leg.grant.blocks.groups[g]):
            return f"blocks from {need} on are wanted, only those from {covered} on were staged"
        return None
    used = [g for g in groups if any(part.blocks.groups[g] for part in t.parts)]
    staged = {g: min(part.first[g] for part in t.parts if part.blocks.groups[g]) for g in used}
    if any(covered[g] > staged[g] for g in used):
        return f"blocks from {staged} on were staged with gaps before {covered}"
    theirs = window(covered, t.coverage.layout, leg.layout, t.tokens)
    if any(leg.grant.first[g] > theirs[g] for g in used):
        return f"blocks from {theirs} on are wanted, only those from {leg.grant.first} on are granted"
    return None
