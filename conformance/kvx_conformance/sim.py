"""Random worlds over the real endpoint: `run_world(seed)` lives through one and says what went wrong.

A world has two or three instances of one to three ranks, a handful of requests, and, except in
calm worlds, aborts, crashes, cuts and stalls at random moments. What must hold is checked as it
happens (`oneside`, `toy_engine`) and at rest (`verdict`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvx.core.endpoint import Endpoint
from kvx.core.model import InstanceInfo, Layout, News, Outcome, Role
from kvx_conformance.fabric import Fabric, Process
from kvx_conformance.ordeal import Ordeal
from kvx_conformance.plans import blocks_wanted, draw_climate, draw_plans, sized
from kvx_conformance.toy import Cache, Model, Pool
from kvx_conformance.toy_engine import Engine, Job
from kvx_conformance.traffic import Traffic
from kvx_conformance.verdict import Verdict

SLACK_S = 2.0
"""Latencies and scheduling on top of what the limits add up to."""
MAX_STEPS = 150_000


@frozen
class Summary:
    """What one world was and what was wrong in it."""

    seed: int
    kind: str
    transfers: int
    ok: int
    failed: int
    aborts: int
    crashes: int
    cuts: int
    stalls: int
    quarantined: int
    steps: int
    violations: tuple[str, ...]


@define(eq=False)
class Place:
    """Where an instance runs, over all its starts."""

    name: str
    layouts: tuple[Layout, ...]
    offsets: tuple[float, ...]
    rates: tuple[float, ...]
    engine: Engine = field(init=False)
    disturbed: bool = False

    def address(self, rank: int) -> str:
        return f"{self.name}:{7000 + rank}"


class World:
    """One seed's world."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)  # noqa: S311 - a world, not a key
        self.kind = rng.choice(("calm", "aborts", "faults", "faults", "storm"))
        self.key = rng.randbytes(16) if rng.random() < 0.5 else b""
        self.fabric = Fabric(rng, draw_climate(rng, self.kind), trace)
        self.clock = self.fabric.clock
        self.span = rng.uniform(4.0, 20.0)
        self.stats = dict.fromkeys(("aborts", "crashes", "cuts", "stalls"), 0)
        self.quarantined = 0
        self.engines: list[Engine] = []
        self.jobs: dict[tuple[str, Role, str], tuple[Engine, Job]] = {}
        self.stalled: dict[str, float] = {}
        names = ("red", "blue", "green")[: rng.choice((2, 2, 2, 3))]
        self.plans = draw_plans(rng, self.kind, names)
        self.places = self._draw_places(names)
        for place in self.places.values():
            self.start(place)
        self._traffic = Traffic(self)
        self._traffic.begin()
        self.ordeal = Ordeal(self)
        self.ordeal.begin()

    def _draw_places(self, names: Sequence[str]) -> dict[str, Place]:
        rng, model, places = self.rng, Model.draw(self.rng), {}
        roomy = self.kind == "calm" or rng.random() < 0.5
        for name in names:
            layouts = model.layouts(rng, 1)
            wanted = [blocks_wanted(plan, name, layouts[0]) for plan in self.plans if name in plan.names]
            blocks = max(4, sum(wanted) if roomy else max(wanted, default=0) + 2)
            layouts = tuple(sized(layout, blocks) for layout in layouts)
            offsets = tuple(rng.uniform(0, 1e6) for _ in layouts)
            places[name] = Place(name, layouts, offsets, tuple(rng.uniform(0.996, 1.004) for _ in layouts))
        return places

    # -------------------------------------------------------------------- starts

    def start(self, place: Place) -> Engine:
        """One start of an instance: a new epoch, and nothing left of the old one."""
        epoch = self.rng.getrandbits(63)
        processes = []
        caches = tuple(Cache(layout) for layout in place.layouts)
        pool = Pool.of(caches)
        addresses = tuple(place.address(rank) for rank in range(len(place.layouts)))
        climate = self.fabric.climate
        for rank, cache in enumerate(caches):
            info = InstanceInfo(place.name, rank, epoch, addresses[rank], place.layouts[rank], ("sim",), addresses)
            endpoint = Endpoint(
                info,
                capabilities=lambda _: climate.capabilities,
                entropy=self.rng.randbytes,
                key=self.key,
                limits=climate.limits,
                integrity=climate.integrity,
            )
            process = Process(
                self.fabric, info, endpoint, cache, pool, self._hear, place.offsets[rank], place.rates[rank]
            )
            processes.append(process)
            self.fabric.processes.append(process)
            self.fabric.listeners[info.address] = process
        place.engine = Engine(self.fabric, place.name, tuple(processes), pool, self.key)
        self.engines.append(place.engine)
        return place.engine

    def _hear(self, process: Process, news: News) -> None:
        engine = next(engine for engine in self.engines if process in engine.processes)
        engine.hear(process, news)
        if isinstance(news, Outcome) and news.ok:
            job = engine.jobs[news.transfer]
            if job.work.role is Role.CONSUMER and job.ok(len(engine.processes)):
                self._traffic.ended_well(news.transfer)

    # ----------------------------------------------------------------------- run

    def run(self) -> Summary:
        """Live through it, check what is left, and heal what was left in quarantine."""
        limits, verdict = self.fabric.climate.limits, Verdict(self)
        self._live(self.span + limits.patience_s + 3 * self.bound("") + sum(self.stalled.values()) + 40)
        if not self.fabric.violations:
            verdict.at_rest()
        if not self.fabric.violations and self.quarantined:
            self.ordeal.end()
            self._live(self.clock.now + limits.handshake_s + limits.lost_s + 3 * limits.grace_s + limits.quarantine_s)
            verdict.healed()
        jobs = [job for _, job in self.jobs.values()]
        return Summary(
            seed=self.seed,
            kind=self.kind,
            transfers=len(jobs),
            ok=sum(job.ok(len(engine.processes)) for engine, job in self.jobs.values()),
            failed=sum(job.failed for job in jobs),
            quarantined=self.quarantined,
            steps=self.clock.steps,
            violations=tuple(self.fabric.violations),
            **self.stats,
        )

    def _live(self, until: float) -> None:
        while not self.fabric.violations and self.clock.step(until):
            if self.clock.steps > MAX_STEPS:
                self.fabric.violation(f"no rest after {MAX_STEPS} steps")

    def bound(self, process: str) -> float:
        """The longest wait for an Outcome that the limits allow, seconds."""
        limits = self.fabric.climate.limits
        last = max(limits.ack_wait_s, limits.drain_limit_s, limits.grace_s)
        return (limits.transfer_max_s + last) * 1.01 + self.stalled.get(process, 0.0) + SLACK_S


def run_world(seed: int, trace: Callable[[str], None] | None = None) -> Summary:
    """Live through the world of this seed. Deterministic: the same seed gives the same summary and trace."""
    return World(seed, trace).run()
