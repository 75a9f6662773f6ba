"""Random worlds over the real endpoint: `run_world(seed)` lives through one and says what went wrong.

A world has two or three instances of one to three ranks, a handful of requests, and, except in
calm worlds, aborts, crashes, cuts and stalls at random moments. What must hold is checked as it
happens (`oneside`, `toy_engine`) and at rest (`verdict`). All that is to happen is drawn beforehand
as elements with names, of which a world can be told to play some only (`shrink`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from kvx.core.endpoint import Endpoint
from kvx.core.model import InstanceInfo, Layout, News, Outcome, Role
from kvx_conformance.climate import Climate
from kvx_conformance.fabric import Fabric, Process
from kvx_conformance.ordeal import Ordeal
from kvx_conformance.plans import blocks_wanted, draw_climate, draw_plans, sized
from kvx_conformance.room import Note, streams
from kvx_conformance.toy import Cache, Model, Pool
from kvx_conformance.toy_engine import Engine, Job
from kvx_conformance.traffic import Traffic
from kvx_conformance.verdict import Verdict

SLACK_S = 2.0
"""Latencies and scheduling on top of what the limits add up to."""
MAX_STEPS = 150_000
WEATHER = ("op_fails", "op_hangs", "op_hangs_forever", "corrupts", "duplicates")
"""What a climate has of chance; each is an element of its world."""


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
    deaths: int
    restarts: int
    cuts: int
    stalls: int
    duplicates: int
    reuses: int
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

    @property
    def ranks(self) -> int:
        return len(self.layouts)

    def address(self, rank: int) -> str:
        return f"{self.name}:{7000 + rank}"


class World:
    """One seed's world, or what is left of it with `only` these elements."""

    def __init__(
        self, seed: int, trace: Callable[[Note], None] | None = None, only: Collection[str] | None = None
    ) -> None:
        self.seed = seed
        self.elements: dict[str, str] = {}
        """All that can be left out: id -> what it is."""
        self._only = only
        self.chance = streams(seed)
        rng = self.chance("world")
        self.kind = rng.choice(("calm", "aborts", "faults", "faults", "storm"))
        self.key = rng.randbytes(16) if rng.random() < 0.5 else b""
        self.fabric = Fabric(self.chance, self._weather(draw_climate(self.chance("climate"), self.kind)), trace)
        self.clock = self.fabric.clock
        self.span = rng.uniform(4.0, 20.0)
        self.stats = dict.fromkeys(("aborts", "crashes", "deaths", "restarts", "cuts", "stalls"), 0)
        self.quarantined = 0
        self.engines: list[Engine] = []
        self.jobs: dict[tuple[str, Role, str], tuple[Engine, Job]] = {}
        self.stalled: dict[str, float] = {}
        names = ("red", "blue", "green")[: rng.choice((2, 2, 2, 3))]
        self.plans = draw_plans(self.chance("plans"), self.kind, names)
        self.places = self._draw_places(names)
        for place in self.places.values():
            self.start(place)
        self._traffic = Traffic(self)
        self._traffic.begin()
        self.ordeal = Ordeal(self)
        self.ordeal.begin()

    def plays(self, element: str, what: str) -> bool:
        """Name an element of this world; says whether it happens."""
        self.elements[element] = what
        return self._only is None or element in self._only

    def _weather(self, drawn: Climate) -> Climate:
        chances = {name: getattr(drawn, name) for name in WEATHER}
        left_out = [n for n, c in chances.items() if c and not self.plays(n.replace("_", "-"), f"chance {c}")]
        still: dict[str, Any] = dict.fromkeys(left_out, 0.0)
        return evolve(drawn, **still)

    def _draw_places(self, names: Sequence[str]) -> dict[str, Place]:
        rng, places = self.chance("places"), {}
        model = Model.draw(rng)
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
        epoch = self.chance("epochs", place.name).getrandbits(63)
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
                entropy=self.chance("entropy", info.peer).randbytes,
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
            duplicates=self.fabric.duplicates,
            reuses=sum(engine.pool.reuses for engine in self.engines),
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


def run_world(seed: int, trace: Callable[[str], None] | None = None, only: Collection[str] | None = None) -> Summary:
    """Live through the world of this seed. Deterministic: the same seed gives the same summary and trace.

    With `only`, what else the world has does not happen. Raises ValueError for an element it does not have.
    """
    world = World(seed, (lambda note: trace(str(note))) if trace else None, only)
    if unknown := set(only or ()) - world.elements.keys():
        raise ValueError(f"the world of seed {seed} has no {sorted(unknown)}; it has {', '.join(world.elements)}")
    return world.run()
