"""One rank of a toy engine that does what a scenario says, the same in a simulation and in a process.

It owns a cache whose every byte is known and a pool that poisons what it gets back. Block ids of
producer and consumer differ, blocks stay out of the pool until kvx has released them, and a byte
that lands in a block nobody owns is found by `flaws`.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from attrs import define, field, frozen

from kvx.core.events import Abort, Claim, Drain, EngineEvent, Expose, Stage
from kvx.core.model import (
    BlockTable,
    CacheGroup,
    LayerSpec,
    Layout,
    Mode,
    News,
    Offered,
    Outcome,
    Packing,
    Part,
    Reason,
    Released,
    Role,
    Ticket,
)
from kvx_conformance.toy import CELL_BYTES, Cache, Pool

BLOCKS = 24
LAYERS = ("layer.0", "layer.1", "layer.2")
JUNK = (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95\x1b\x00\x00\x00\x00", bytes(64), b"\xff" * 4096)
"""What a stranger may send to any port."""


def seed_of(who: str) -> int:
    """All ranks of an instance draw alike, so a block id means the same place on each of them."""
    return zlib.crc32(who.encode())


@frozen
class Shape:
    """What an instance looks like: the facts that a scenario varies."""

    ranks: int = 1
    block_size: int = 256
    heads: int = 4
    model: str = "toy"

    def layout(self, rank: int) -> Layout:
        own = max(1, self.heads // self.ranks)
        size = self.block_size * own * CELL_BYTES
        layers = tuple(LayerSpec(name, 0, i * size * BLOCKS, size, size) for i, name in enumerate(LAYERS))
        group = CacheGroup(0, "toy", self.block_size, layers, own, self.heads, Packing.HEADS_TOKENS)
        return Layout(self.model, "u32", "scenario", (group,), BLOCKS, rank, self.ranks)


@frozen
class Call:
    """What an engine says. Counts are in tokens; a block that `tokens` reaches into is meant as a whole.

    `do` is expose, stage, claim, abort or drain. Tokens from `start` (a multiple of the block
    size) to `stop` are handed over, of a prompt of `tokens`; `content` decides their bytes, `prompt` is what the
    engine gives as their digest.
    """

    who: str
    do: str
    transfer: str = "t"
    mode: Mode = Mode.PUSH
    producer: str = "p"
    tokens: int = 2000
    start: int = 0
    stop: int | None = None
    layers: tuple[str, ...] | None = None
    last: bool = True
    content: int = 7
    lease_s: float | None = None
    reason: Reason = Reason.ABORTED
    prompt: str = ""

    @property
    def role(self) -> Role:
        return Role.PRODUCER if self.who == self.producer else Role.CONSUMER


@define
class Job:
    """One transfer as this engine sees it."""

    content: int
    tokens: int
    role: Role
    first: int
    blocks: tuple[int, ...] = ()
    finished: bool = False
    given_back: bool = False
    outcomes: list[Outcome] = field(factory=list)
    released: int = 0
    right: bool | None = None


class Actor:
    """See the module. `call` makes the events for kvx; what kvx says comes in through `hear`."""

    def __init__(self, shape: Shape, rank: int, seed: int) -> None:
        self.layout = shape.layout(rank)
        self.cache = Cache(self.layout)
        self.pool = Pool.of((self.cache,))
        self.jobs: dict[str, Job] = {}
        self.offered: set[str] = set()
        self._rng = random.Random(seed)  # noqa: S311 - block ids, not keys
        self._rng.shuffle(self.pool.free)

    # ------------------------------------------------------------------ what it says

    def call(self, call: Call, *, address: str | None, ticket: Ticket | None, lease_s: float) -> EngineEvent:
        """What kvx is to be told; a producer's blocks are filled. `address` and `ticket` are for consumers alone."""
        transfer, mode = call.transfer, call.mode
        match call.do:
            case "expose":
                job = self._job(call)
                part = self._part(job, call)
                place = (part.blocks, part.first, call.tokens)
                event: EngineEvent = Expose(transfer, mode, *place, lease_s, address, call.prompt)
                job.finished = True
            case "stage":
                job = self._job(call)
                event = Stage(transfer, mode, self._part(job, call), call.last, call.tokens, ticket, call.prompt)
                job.finished = call.last
            case "claim":
                self._job(call)
                event = Claim(transfer, mode, ticket, address)
            case "abort":
                event = Abort(transfer, call.reason, "", ticket, address)
                if transfer in self.jobs:
                    self.jobs[transfer].finished = True
            case "drain":
                event = Drain(lease_s)
            case _:
                raise ValueError(f"an engine does not say {call.do!r}")
        self._tidy(transfer)
        return event

    def _job(self, call: Call) -> Job:
        """The record of this transfer; its first call takes the blocks of all its parts."""
        job = self.jobs.get(call.transfer)
        size = self.layout.groups[0].block_size
        if job is None:
            job = self.jobs[call.transfer] = Job(call.content, call.tokens, call.role, call.start // size)
        if call.do != "claim" and not job.blocks:
            job.first = call.start // size
            wanted = -(-call.tokens // size) - job.first
            table = self.pool.take(call.transfer, [wanted], self._rng)
            if table is None:
                raise ValueError(f"{wanted} blocks are wanted, {len(self.pool.free)} are free")
            job.blocks = table.groups[0]
        return job

    def _part(self, job: Job, call: Call) -> Part:
        size = self.layout.groups[0].block_size
        low = call.start // size
        high = -(-call.tokens // size) if call.stop is None else -(-call.stop // size)
        blocks = BlockTable.of(job.blocks[low - job.first : high - job.first])
        if call.role is Role.PRODUCER:
            self.cache.fill(job.content, (low,), blocks, call.layers)
        return Part(call.layers, (low,), blocks)

    def table(self, transfer: str) -> tuple[int, BlockTable]:
        """(position of the first block, blocks): what a ticket is made of."""
        job = self.jobs[transfer]
        return job.first, BlockTable.of(job.blocks)

    # ----------------------------------------------------------------- what it hears

    def hear(self, news: News) -> None:
        if isinstance(news, Offered):
            self.offered.add(news.grant.transfer)
            return
        job = self.jobs.get(news.transfer)
        if job is None:
            job = self.jobs[news.transfer] = Job(0, 0, Role.PRODUCER, 0)
        match news:
            case Outcome():
                job.outcomes.append(news)
                if news.ok and job.role is Role.CONSUMER and job.blocks:
                    job.right = not self.cache.flaws(job.content, (job.first,), BlockTable.of(job.blocks), job.tokens)
            case Released():
                job.released += 1
        self._tidy(news.transfer)

    def _tidy(self, transfer: str) -> None:
        """Released blocks go back at once, poisoned, the last ones first in line."""
        job = self.jobs.get(transfer)
        if job is not None and job.blocks and job.released and job.finished and not job.given_back:
            job.given_back = True
            self.pool.give_back(BlockTable.of(job.blocks))

    # -------------------------------------------------------------------- what it is

    def row(self, transfer: str) -> dict[str, Any]:
        """How this transfer stands here."""
        job = self.jobs.get(transfer) or Job(0, 0, Role.PRODUCER, 0)
        outcome = job.outcomes[0] if job.outcomes else None
        reason = outcome.reason.value if outcome is not None and outcome.reason is not None else None
        return {
            "outcome": None if outcome is None else "ok" if outcome.ok else "failed",
            "reason": reason,
            "detail": "" if outcome is None else outcome.detail,
            "released": bool(job.released),
            "right": job.right,
        }

    def flaws(self) -> list[str]:
        """What must never be: a report given twice, or a byte in blocks that nobody owns."""
        found = [
            f"{transfer}: {len(job.outcomes)} outcomes, {job.released} times released"
            for transfer, job in self.jobs.items()
            if len(job.outcomes) > 1 or job.released > 1
        ]
        written = [block for block in self.pool.free if not self.cache.poisoned(block)]
        return found + ([f"blocks {written} were written while nobody owned them"] if written else [])

    @property
    def full(self) -> bool:
        """Every block is back."""
        return len(self.pool.free) == self.pool.size


def holds(actor: Actor, snapshot: dict[str, Any], condition: str, transfer: str) -> bool:
    """Whether a condition that a scenario waits for is met.

    outcome, released, offered: this engine was told. rest: kvx has nothing open and owes no word.
    alone: no peer is connected. unmoving: no leg moves the transfer's bytes any more, or it is over. Anything else is
    the state of one of the transfer's legs.
    """
    job = actor.jobs.get(transfer)
    match condition:
        case "outcome":
            return job is not None and bool(job.outcomes)
        case "released":
            return job is not None and bool(job.released)
        case "offered":
            return transfer in actor.offered
        case "rest":
            return not snapshot["open"] and not snapshot["errands"]
        case "alone":
            return not any(snapshot["peers"].values())
        case "unmoving":
            return "moving" not in snapshot["open"].get(transfer, ())
        case state:
            return state in snapshot["open"].get(transfer, ())
