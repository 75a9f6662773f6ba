"""A toy engine per instance: requests with known contents, a pool of blocks, and the adapter's duties.

It keeps the rules an adapter has to keep: blocks stay out of the pool until every rank that was
handed them has said Released, the instance's outcome is made in one place, and the first rank
that fails aborts the others (R7). What kvx owes it is checked as it comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import Enum

from attrs import define, field, frozen

from kvx.core.events import Abort, Claim, EngineEvent, Expose, Stage
from kvx.core.legs import Limits
from kvx.core.model import (
    SIDE,
    BlockTable,
    Layout,
    Mode,
    News,
    Offered,
    Outcome,
    Part,
    Reason,
    Released,
    Role,
    Side,
    Ticket,
)
from kvx_conformance.fabric import Fabric, Process
from kvx_conformance.toy import Pool


class Steps(Enum):
    """How an initiator hands its blocks over."""

    WHOLE = "whole"
    LAYERS = "layers"
    CHUNKS = "chunks"


@frozen
class Work:
    """What one engine is asked to do for one transfer. `need` gives, per group, the first token wanted."""

    transfer: str
    mode: Mode
    role: Role
    content: int
    tokens: int
    need: tuple[int, ...]
    lease_s: float
    address: str | None = None
    ticket: Ticket | None = None
    claims: bool = False
    steps: Steps = Steps.WHOLE
    pace_s: float = 0.05
    queue_s: float = 0.0
    late_s: float = 0.0
    """So much later than the scheduler, which makes the ticket, the ranks hear of Expose."""
    stubborn: bool = False
    """Goes on staging after a failure, as an engine does whose step is under way."""


@define(eq=False)
class Job:
    """How far this engine has come with it."""

    work: Work
    started: float
    rng: random.Random
    first: tuple[int, ...] = ()
    blocks: BlockTable | None = None
    given_back: bool = False
    closing: bool = False  # a rank has been given its last part
    staged: bool = False  # the last part or the blocks have been handed over
    aborted: bool = False
    called: dict[int, float] = field(factory=dict)  # rank -> time of the first call that owes an Outcome
    handed: set[int] = field(factory=set)
    outcomes: dict[int, Outcome] = field(factory=dict)
    took: dict[int, float] = field(factory=dict)
    released: set[int] = field(factory=set)
    next_put: dict[int, float] = field(factory=dict)  # rank -> when it has heard all that was put

    @property
    def failed(self) -> bool:
        return self.aborted or any(not outcome.ok for outcome in self.outcomes.values())

    def ok(self, ranks: int) -> bool:
        return len(self.outcomes) == ranks and all(outcome.ok for outcome in self.outcomes.values())

    @property
    def over(self) -> bool:
        return self.called.keys() <= self.outcomes.keys() and self.handed <= self.released


def first_blocks(layout: Layout, need: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Positions, in blocks of this side, from which everything from token `need` on is covered."""
    return tuple(
        -(-tokens // group.block_size) if start >= tokens else start // group.block_size
        for group, start in zip(layout.groups, need, strict=True)
    )


def counts(layout: Layout, first: Sequence[int], tokens: int) -> list[int]:
    return [-(-tokens // group.block_size) - start for group, start in zip(layout.groups, first, strict=True)]


def parts(layout: Layout, first: tuple[int, ...], blocks: BlockTable, steps: Steps, rng: random.Random) -> list[Part]:
    """The same blocks in one or several parts, in some order; a rank of a pipeline has its own layers only."""
    own = [layer.name for group in layout.groups for layer in group.layers]
    longest = max(map(len, blocks.groups))
    if steps is Steps.LAYERS and len(own) > 1 and longest:
        rng.shuffle(own)
        cut = rng.randrange(1, len(own))
        return [Part(tuple(own[:cut]), first, blocks), Part(tuple(own[cut:]), first, blocks)]
    if steps is Steps.CHUNKS and longest > 1:
        cut = rng.randrange(1, longest)
        heads, tails, at = [], [], []
        for start, ids in zip(first, blocks.groups, strict=True):
            keep = max(0, len(ids) - cut)
            heads.append(ids[:keep])
            tails.append(ids[keep:])
            at.append(start + keep)
        return [Part(None, first, BlockTable.of(*heads)), Part(None, tuple(at), BlockTable.of(*tails))]
    return [Part(None, first, blocks)]


class Engine:
    """One start of one instance: its processes, its pool and its jobs."""

    def __init__(self, fabric: Fabric, name: str, processes: tuple[Process, ...], pool: Pool, key: bytes) -> None:
        self.fabric, self.name, self.processes, self.pool, self.key = fabric, name, processes, pool, key
        self.jobs: dict[str, Job] = {}
        self.dead = False
        self.offers: int = 0
        self._waiting: list[Callable[[], bool]] = []

    @property
    def layout(self) -> Layout:
        return self.processes[0].info.layout

    @property
    def limits(self) -> Limits:
        return self.fabric.climate.limits

    # ---------------------------------------------------------------- the work

    def accept(self, work: Work) -> Job:
        """Take a request; what follows happens by itself."""
        job = self.jobs[work.transfer] = Job(
            work, self.fabric.clock.now, self.fabric.chance("engine", self.name, work.transfer)
        )
        layout = self.layout
        job.first = first_blocks(layout, work.need, work.tokens)
        if work.claims:
            self._put_all(job, lambda _: Claim(work.transfer, work.mode, work.ticket, work.address))
        self.fabric.clock.after(work.queue_s, lambda: self._when_free(lambda: self._begin(job)))
        return job

    def _when_free(self, act: Callable[[], bool]) -> None:
        if not self.dead and (self._waiting or not act()):
            self._waiting.append(act)

    def _begin(self, job: Job) -> bool:
        """Take blocks and go on; False if there are too few now."""
        if self.dead or job.failed:
            return True
        wanted = counts(self.layout, job.first, job.work.tokens)
        blocks = self.pool.take(job.work.transfer, wanted, job.rng)
        if blocks is None:
            return False
        spoiled = self.pool.spoiled(blocks)
        if spoiled:
            self.fabric.violation(f"blocks {spoiled} of {self.name} were written while nobody owned them")
            self.pool.owner.update(dict.fromkeys(spoiled, job.work.transfer))
        job.blocks = blocks
        work = job.work
        if SIDE[(work.mode, work.role)] is Side.TARGET:
            if work.role is Role.PRODUCER:
                for process in self.processes:
                    process.cache.fill(work.content, job.first, blocks, None)
            job.staged = True
            event = Expose(work.transfer, work.mode, blocks, job.first, work.tokens, work.lease_s, work.address)
            self._put_all(job, lambda _: event, work.late_s)
        else:
            self._stage(job, blocks)
        return True

    def _stage(self, job: Job, blocks: BlockTable) -> None:
        work, rng = job.work, job.rng
        plans = [parts(p.info.layout, job.first, blocks, work.steps, rng) for p in self.processes]
        rounds = max(map(len, plans))
        left = {rank: len(plan) for rank, plan in enumerate(plans)}

        def go(number: int) -> None:
            if self.dead or job.aborted or (job.failed and not work.stubborn):
                return
            for rank, plan in enumerate(plans):
                if number < len(plan):
                    left[rank] -= 1
                    self._put_part(job, rank, plan[number], last=not left[rank])
            if number + 1 < rounds:
                # An engine slower than `part_gap_s` would fail its transfers, and rightly so.
                gap = min(rng.expovariate(1 / work.pace_s), 0.5 * self.limits.part_gap_s)
                self.fabric.clock.after(gap, lambda: go(number + 1))
            else:
                job.staged = True
                self._tidy(job)

        go(0)

    def _put_part(self, job: Job, rank: int, part: Part, *, last: bool) -> None:
        work = job.work
        if work.role is Role.PRODUCER:
            self.processes[rank].cache.fill(work.content, part.first, part.blocks, part.layers)
        job.closing |= last
        self._put(job, rank, Stage(work.transfer, work.mode, part, last, work.tokens, work.ticket))

    def abort(self, transfer: str, reason: Reason = Reason.ABORTED, *, at_once: bool = False) -> bool:
        """The client has left, or a rank has failed. `at_once`: a preempted producer takes its blocks back (R11)."""
        job = self.jobs.get(transfer)
        if self.dead or job is None or job.aborted or (job.over and job.called):
            return False
        early = at_once and job.work.mode is Mode.PUSH and job.work.role is Role.PRODUCER and not job.closing
        job.aborted = True
        for rank in range(len(self.processes)):
            self._put(job, rank, Abort(transfer, reason, "", job.work.ticket, job.work.address))
        if early and job.blocks and not job.given_back:
            job.given_back = True
            self.pool.give_back(job.blocks)
        self._tidy(job)
        return True

    def _put_all(self, job: Job, make: Callable[[int], EngineEvent], late_s: float = 0.0) -> None:
        for rank in range(len(self.processes)):
            self._put(job, rank, make(rank), late_s)

    def _put(self, job: Job, rank: int, event: EngineEvent, late_s: float = 0.0) -> None:
        """Ranks hear of a step a little apart, each in the order of its job."""
        now = self.fabric.clock.now
        if not isinstance(event, Abort):
            job.called.setdefault(rank, now)
        if isinstance(event, Expose | Stage):
            job.handed.add(rank)
        moment = max(job.next_put.get(rank, 0.0) + 1e-6, now + late_s + job.rng.expovariate(1 / 0.002))
        job.next_put[rank] = moment
        self.fabric.clock.at(moment, lambda: self.processes[rank].feed(event))

    # ---------------------------------------------------------------- the news

    def hear(self, process: Process, news: News) -> None:
        """Check what kvx says, and do what an adapter has to do."""
        if isinstance(news, Offered):
            self.offers += 1
            return
        rank, job = process.info.rank, self.jobs.get(news.transfer)
        if job is None:
            self.fabric.violation(f"{process.name} has news of {news.transfer}, which its engine never gave it")
            return
        match news:
            case Outcome():
                self._ended(job, process, rank, news)
            case Released():
                self._freed(job, process, rank)
        self._tidy(job)

    def _ended(self, job: Job, process: Process, rank: int, outcome: Outcome) -> None:
        transfer = outcome.transfer
        if rank in job.outcomes:
            self.fabric.violation(f"{process.name} got a second Outcome of {transfer}")
        if rank not in job.called:
            self.fabric.violation(f"{process.name} got an Outcome of {transfer} that nobody is owed")
        job.outcomes[rank] = outcome
        job.took[rank] = self.fabric.clock.now - job.called.get(rank, 0.0)
        if outcome.ok and job.work.role is Role.CONSUMER and job.blocks is not None:
            flaws = process.cache.flaws(job.work.content, job.first, job.blocks, job.work.tokens)
            if flaws:
                self.fabric.violation(f"{transfer} is ok at {process.name}, but wrong: {'; '.join(flaws)}")
        if outcome.ok and job.given_back:
            self.fabric.violation(f"{transfer} is ok at {process.name}, whose blocks were taken back")
        if not outcome.ok and not job.aborted and not job.work.stubborn:
            delay = job.rng.expovariate(1 / 0.01)
            self.fabric.clock.after(delay, lambda: self._spread_failure(job))

    def _spread_failure(self, job: Job) -> None:
        if not self.dead and not (job.staged and len(job.outcomes) == len(self.processes)):
            self.abort(job.work.transfer)

    def _freed(self, job: Job, process: Process, rank: int) -> None:
        transfer = job.work.transfer
        if rank in job.released:
            self.fabric.violation(f"{process.name} got a second Released of {transfer}")
        if rank not in job.handed:
            self.fabric.violation(f"{process.name} got Released of {transfer}, for which it handed over nothing")
        if rank not in job.outcomes:
            self.fabric.violation(f"{process.name} got Released of {transfer} before its Outcome")
        job.released.add(rank)

    def _tidy(self, job: Job) -> None:
        """Blocks go back when every rank has let go of them and no more parts are to come."""
        if job.blocks is None or job.given_back or not job.handed <= job.released:
            return
        stopped = job.staged or job.aborted or (job.failed and not job.work.stubborn)
        if not stopped or (not job.handed and not job.failed):
            return
        job.given_back = True
        self.pool.give_back(job.blocks)
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            self._when_free(act)
