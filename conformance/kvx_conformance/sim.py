"""Random worlds over the real endpoint: `run_world(seed)` lives through one and says what went wrong.

A world has two or three instances of one to three ranks, a handful of requests, and, except in
calm worlds, aborts, crashes, cuts and stalls at random moments. What must hold is checked as it
happens (`fabric`, `toy_engine`) and at rest (here).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from attrs import define, evolve, frozen

from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.events import Drain
from kvx.core.legs import Limits
from kvx.core.model import FenceScope, Grant, InstanceInfo, Layout, Mode, News, Peer, Reason, Role, Ticket
from kvx_conformance.climate import Climate, capabilities_of, stretched
from kvx_conformance.fabric import Fabric, Process
from kvx_conformance.toy import Cache, Model, Pool
from kvx_conformance.toy_engine import Engine, Job, Steps, Work, counts, first_blocks

LIMITS = Limits(
    patience_s=20,
    part_gap_s=10,
    op_timeout_s=6,
    drain_limit_s=2,
    grace_s=3,
    quarantine_s=2,
    transfer_max_s=60,
    keepalive_s=1,
    lost_s=3,
    ack_wait_s=3,
    handshake_s=3,
    lease_s=6,
)
"""The defaults, about five times faster, so that all kinds of failure fit into a short world."""
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


@frozen
class Plan:
    """One request as the router sees it."""

    transfer: str
    mode: Mode
    producer: str
    consumers: tuple[str, ...]
    content: int
    tokens: int
    need: int
    reaches: frozenset[Role]
    twisted: bool = False
    """Producer and consumer were told different prompts: it must fail, on both sides."""

    @property
    def whole(self) -> bool:
        return len(self.reaches) == 2 and len(self.consumers) == 1 and not self.twisted


@define(eq=False)
class Place:
    """Where an instance runs, over all its starts."""

    name: str
    layouts: tuple[Layout, ...]
    offsets: tuple[float, ...]
    rates: tuple[float, ...]
    engine: Engine | None = None
    disturbed: bool = False
    draining: bool = False

    def address(self, rank: int) -> str:
        return f"{self.name}:{7000 + rank}"


class World:
    """One seed's world."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)  # noqa: S311 - a world, not a key
        self.kind = rng.choice(("calm", "aborts", "faults", "faults", "storm"))
        self.model = Model.draw(rng)
        self.key = rng.randbytes(16) if rng.random() < 0.5 else b""
        self.fabric = Fabric(rng, self._climate(), trace)
        self.clock = self.fabric.clock
        self.span = rng.uniform(4.0, 20.0)
        self.stats = dict.fromkeys(("aborts", "crashes", "cuts", "stalls"), 0)
        self.quarantined = 0
        self.engines: list[Engine] = []
        self.plans: list[Plan] = []
        self.jobs: dict[tuple[str, Role, str], tuple[Engine, Job]] = {}
        self.stalled: dict[str, float] = {}
        self.places = {name: self._place(name) for name in ("red", "blue", "green")[: rng.choice((2, 2, 2, 3))]}
        self._plan_requests()
        for place in self.places.values():
            self._start(place)
        for plan in self.plans:
            self._schedule(plan)
        self._schedule_faults()

    def _climate(self) -> Climate:
        rng, calm = self.rng, self.kind in ("calm", "aborts")
        limits = stretched(LIMITS, rng)
        if self.kind != "calm" and rng.random() < 0.1:
            limits = evolve(limits, transfers=rng.randrange(1, 5), tombstones=rng.randrange(1, 5))
        integrity = rng.random() < 0.4
        stormy = self.kind == "storm"
        return Climate(
            capabilities=capabilities_of(rng),
            limits=limits,
            integrity=integrity,
            latency_s=rng.choice((0.001, 0.005, 0.05) if calm else (0.001, 0.02, 0.1, 0.3)),
            op_s=rng.choice((0.01, 0.1, 0.3)),
            op_fails=0.0 if calm else rng.choice((0.0, 0.05, 0.2)),
            op_hangs=0.0 if calm else rng.choice((0.0, 0.1)),
            op_hangs_forever=rng.choice((0.0, 0.1)) if stormy else 0.0,
            corrupts=0.1 if integrity and not calm and rng.random() < 0.3 else 0.0,
        )

    def _place(self, name: str) -> Place:
        rng = self.rng
        layouts = self.model.layouts(rng, 1)
        offsets = tuple(rng.uniform(0, 1e6) for _ in layouts)
        return Place(name, layouts, offsets, tuple(rng.uniform(0.996, 1.004) for _ in layouts))

    # ------------------------------------------------------------------ requests

    def _plan_requests(self) -> None:
        rng = self.rng
        for number in range(rng.randrange(2, 8)):
            producer, consumer, *rest = rng.sample(sorted(self.places), len(self.places))
            mode = rng.choice(tuple(Mode))
            tokens = rng.randrange(1, 33)
            need = rng.choice((0, 0, 0, rng.randrange(tokens + 1), tokens))
            reaches = frozenset(Role)
            if rng.random() < 0.12:
                reaches = frozenset({rng.choice(tuple(Role)) if mode is Mode.PUSH else Role.PRODUCER})
            second = mode is Mode.PULL and rest and rng.random() < 0.4
            twisted = self.kind != "calm" and rng.random() < 0.05
            consumers = (consumer, rest[0]) if second else (consumer,)
            self.plans.append(
                Plan(f"t{number}", mode, producer, consumers, rng.getrandbits(31), tokens, need, reaches, twisted)
            )
        roomy = self.kind == "calm" or rng.random() < 0.5
        for place in self.places.values():
            need_here = [
                self._blocks_wanted(plan, place)
                for plan in self.plans
                if place.name in (plan.producer, *plan.consumers)
            ]
            blocks = max(4, sum(need_here) if roomy else max(need_here, default=0) + 2)
            place.layouts = tuple(self._sized(layout, blocks) for layout in place.layouts)

    def _blocks_wanted(self, plan: Plan, place: Place) -> int:
        layout, tokens = place.layouts[0], plan.tokens + 1
        return sum(counts(layout, first_blocks(layout, self._need(plan, place.name), tokens), tokens))

    @staticmethod
    def _sized(layout: Layout, blocks: int) -> Layout:
        """The same layout with a pool of this many blocks."""
        offset, groups = 0, []
        for group in layout.groups:
            layers = []
            for layer in group.layers:
                layers.append(evolve(layer, offset=offset))
                offset += layer.stride * blocks
            groups.append(evolve(group, layers=tuple(layers)))
        return evolve(layout, groups=tuple(groups), num_blocks=blocks)

    def _need(self, plan: Plan, name: str) -> tuple[int, ...]:
        """The first token wanted per group: the consumer has the rest, and a window group wants less."""
        layout = self.places[name].layouts[0]
        if name == plan.producer:
            return tuple(0 for _ in layout.groups)
        sizes = [group.block_size for group in layout.groups]
        needs = [plan.need if plan.need >= plan.tokens else plan.need // size * size for size in sizes]
        if len(needs) > 1:
            needs[1] = max(needs[1], plan.tokens // 2 // sizes[1] * sizes[1])
        return tuple(needs)

    def _schedule(self, plan: Plan) -> None:
        """Both sides hear of it some time apart; in pull the consumer only after the ticket is made."""
        rng, limits = self.rng, self.fabric.climate.limits
        start = rng.uniform(0.0, self.span)
        apart = rng.choice((0.0, 0.05, 0.3 * limits.lease_s))
        if plan.mode is Mode.PUSH:
            if Role.PRODUCER in plan.reaches:
                self.clock.at(start + rng.choice((0.0, apart)), lambda: self._work(plan, Role.PRODUCER, plan.producer))
            if Role.CONSUMER in plan.reaches:
                at = start + rng.choice((0.0, apart))
                self.clock.at(at, lambda: self._work(plan, Role.CONSUMER, plan.consumers[0]))
        else:
            self.clock.at(start, lambda: self._work(plan, Role.PRODUCER, plan.producer))
        if self.kind != "calm" and rng.random() < 0.45:
            name = rng.choice((plan.producer, *plan.consumers))
            moment = start + rng.choice((rng.uniform(0.0, 0.5), rng.uniform(0.0, 8.0)))
            self.clock.at(moment, lambda: self._abort(plan, name))

    def _work(self, plan: Plan, role: Role, name: str, ticket: Ticket | None = None) -> None:
        engine = self.places[name].engine
        if engine is None or engine.dead:
            return
        rng, limits = self.rng, self.fabric.climate.limits
        claims = rng.random() < 0.4 and (plan.mode is Mode.PUSH or role is Role.CONSUMER)
        address = self.places[plan.producer].address(0) if plan.mode is Mode.PUSH and role is Role.CONSUMER else None
        queue = rng.choice((0.0, 0.0, rng.uniform(0.0, 1.0)))
        if claims and role is Role.CONSUMER:
            queue = rng.choice((queue, rng.uniform(0.3, 0.8) * limits.patience_s))
        work = Work(
            transfer=plan.transfer,
            mode=plan.mode,
            role=role,
            content=plan.content,
            tokens=plan.tokens + (plan.twisted and role is Role.CONSUMER),
            need=self._need(plan, name),
            lease_s=limits.lease_s,
            address=address,
            ticket=ticket,
            claims=claims,
            steps=rng.choice(tuple(Steps)),
            pace_s=rng.choice((0.01, 0.1, 1.0)),
            queue_s=queue,
            stubborn=rng.random() < 0.2,
        )
        job = engine.accept(work)
        self.jobs[(plan.transfer, role, name)] = (engine, job)
        if plan.mode is Mode.PULL and role is Role.PRODUCER and Role.CONSUMER in plan.reaches:
            self._await_ticket(plan, engine, job)

    def _await_ticket(self, plan: Plan, engine: Engine, job: Job) -> None:
        """The router gets the ticket once blocks are there, and takes its time to pick a consumer."""
        if engine.dead or job.failed:
            return
        if job.blocks is None:
            self.clock.after(0.05, lambda: self._await_ticket(plan, engine, job))
            return
        info = engine.processes[0].info
        grant = Grant(
            transfer=plan.transfer,
            owner=Peer(info.instance, 0),
            epoch=info.epoch,
            generation=0,
            mode=Mode.PULL,
            first=job.first,
            blocks=job.blocks,
            tokens=job.work.tokens,
            lease_s=job.work.lease_s,
            address=info.address,
        )
        ticket = wire.parse_ticket(wire.ticket_text(wire.make_ticket(grant, self.key)))
        for name in plan.consumers:
            delay = self.rng.choice((0.0, 0.01, self.rng.uniform(0.0, 0.4) * job.work.lease_s))
            self.clock.after(delay, partial(self._work, plan, Role.CONSUMER, name, ticket))

    def _abort(self, plan: Plan, name: str) -> None:
        engine = self.places[name].engine
        if engine is not None and not engine.dead:
            reason = self.rng.choice((Reason.ABORTED, Reason.PREEMPTED))
            self.stats["aborts"] += engine.abort(plan.transfer, reason, at_once=reason is Reason.PREEMPTED)

    # -------------------------------------------------------------------- starts

    def _start(self, place: Place) -> Engine:
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
        place.draining = False
        self.engines.append(place.engine)
        return place.engine

    def _hear(self, process: Process, news: News) -> None:
        engine = next(engine for engine in self.engines if process in engine.processes)
        engine.hear(process, news)

    # -------------------------------------------------------------------- faults

    def _schedule_faults(self) -> None:
        rng = self.rng
        if self.kind in ("calm", "aborts"):
            return
        chance = 0.5 if self.kind == "faults" else 0.8
        for place in self.places.values():
            if rng.random() < chance * 0.6:
                self.clock.at(rng.uniform(0.0, self.span + 3), partial(self._crash, place))
            if rng.random() < chance * 0.6:
                self.clock.at(rng.uniform(0.0, self.span + 3), partial(self._stall, place))
            if rng.random() < 0.1:
                self.clock.at(rng.uniform(0.3, 1.0) * self.span, partial(self._drain, place))
        for _ in range(rng.randrange(4)):
            if rng.random() < chance:
                self.clock.at(rng.uniform(0.0, self.span + 3), self._cut)

    def _crash(self, place: Place) -> None:
        engine = place.engine
        if engine is None or engine.dead:
            return
        self.stats["crashes"] += 1
        vanishes = self.rng.random() < 0.3
        self.fabric.say(f"CRASH of {place.name}{' without a word' if vanishes else ''}")
        place.disturbed = engine.dead = True
        for process in engine.processes:
            self.fabric.kill(process, vanishes=vanishes)
        if self.rng.random() < 0.8:
            self.clock.after(self.rng.choice((0.01, 0.5, 5.0)), lambda: self._restart(place))

    def _restart(self, place: Place) -> None:
        if place.engine is None or not place.engine.dead:
            return
        engine = self._start(place)
        self.fabric.say(f"RESTART of {place.name}")

        def replay() -> None:
            for process in engine.processes:
                if self.fabric.replay(process):
                    self.fabric.violation(f"a message of another epoch acted at {process.name}")

        for delay in (0.1, 1.0, 3.0):
            self.clock.after(delay, replay)

    def _stall(self, place: Place) -> None:
        if place.engine is None or place.engine.dead:
            return
        self.stats["stalls"] += 1
        place.disturbed = True
        process = self.rng.choice(place.engine.processes)
        seconds = self.rng.choice((0.3, 2.0, 5.0, 15.0)) * self.rng.uniform(0.5, 1.5)
        self.stalled[process.name] = self.stalled.get(process.name, 0.0) + seconds
        self.fabric.say(f"STALL of {process.name} for {seconds:.2f} s")
        process.stall(seconds)

    def _cut(self) -> None:
        one, two = self.rng.sample(sorted(self.places), 2)
        self.stats["cuts"] += 1
        self.places[one].disturbed = self.places[two].disturbed = True
        seconds = self.rng.choice((0.0, 0.3, 2.0, 6.0, 20.0)) * self.rng.uniform(0.5, 1.5)
        breaks = self.rng.random() < 0.6
        self.fabric.say(f"CUT between {one} and {two} for {seconds:.2f} s, {'broken' if breaks else 'frozen'}")
        if not breaks and self.rng.random() < 0.4:
            for link in self.fabric.between(one, two)[:1]:
                link.frozen_until = self.clock.now + seconds
            return
        self.fabric.cut(one, two, seconds, breaks=breaks)

    def _drain(self, place: Place) -> None:
        if place.engine is None or place.engine.dead:
            return
        place.draining = True
        grace = self.rng.choice((0.0, 1.0, 10.0))
        for process in place.engine.processes:
            process.feed(Drain(grace))

    # ----------------------------------------------------------------------- run

    def run(self) -> Summary:
        limits = self.fabric.climate.limits
        bound = self.bound("")
        end = self.span + limits.patience_s + 2 * bound + sum(self.stalled.values()) + 40
        self._live(end)
        if not self.fabric.violations:
            self._check_rest()
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

    # -------------------------------------------------------------- what must hold

    def _check_rest(self) -> None:
        for engine in self.engines:
            if not engine.dead:
                self._check_engine(engine)
        for plan in self.plans:
            self._check_plan(plan)

    def _check_engine(self, engine: Engine) -> None:
        complain = self.fabric.violation
        stuck: set[str] = set()
        for process in engine.processes:
            snapshot = process.endpoint.snapshot()
            opened = snapshot["open"]
            assert isinstance(opened, dict)
            stuck |= opened.keys()
            self.quarantined += len(opened)
            for transfer, states in opened.items():
                if "fencing" not in states:
                    complain(f"{transfer} is still open at {process.name}: {states}")
                elif not self._excused(transfer, process):
                    complain(f"{transfer} is quarantined at {process.name} without a reason: {states}")
            counted = snapshot["counts"]
            assert isinstance(counted, dict)
            ended = sum(number for name, number in counted.items() if name != "started")
            if counted.get("started", 0) != ended and not opened:
                complain(f"{process.name} started {counted.get('started', 0)} transfers and ended {ended}: {counted}")
            if not opened and process.endpoint.deadline() is not None:
                complain(f"{process.name} still waits for {process.endpoint.deadline()}: {snapshot}")
        for transfer, job in engine.jobs.items():
            self._check_job(engine, transfer, job, transfer in stuck)
        held = engine.pool.size - len(engine.pool.free)
        if held and not stuck:
            complain(f"{held} blocks of {engine.name} never came back: {engine.pool.owner}")

    def _check_job(self, engine: Engine, transfer: str, job: Job, quarantined: bool) -> None:
        for rank in job.called:
            name = engine.processes[rank].name
            outcome = job.outcomes.get(rank)
            if outcome is None:
                self.fabric.violation(f"no Outcome of {transfer} ever came at {name}")
            elif job.took[rank] > self.bound(name):
                self.fabric.violation(f"the Outcome of {transfer} at {name} took {job.took[rank]:.1f} s")
            if rank in job.handed and rank not in job.released and not quarantined:
                self.fabric.violation(f"no Released of {transfer} ever came at {name}")

    def _excused(self, transfer: str, process: Process) -> bool:
        """Quarantine without end has a reason: a writer that can neither answer nor be fenced, nor is proven dead."""
        if any(op.hung and op.transfer == transfer for p in self.fabric.processes for op in p.ops.values()):
            return True
        if self.fabric.climate.capabilities.fence is not FenceScope.NONE:
            return False
        return any(not p.alive for p in self.fabric.processes if p.info.instance != process.info.instance)

    def _check_plan(self, plan: Plan) -> None:
        complain = self.fabric.violation
        sides = {key[1:]: found for key, found in self.jobs.items() if key[0] == plan.transfer}
        oks = {key: job.ok(len(engine.processes)) for key, (engine, job) in sides.items()}
        readers = [key for key, ok in oks.items() if ok and key[0] is Role.CONSUMER]
        producer = oks.get((Role.PRODUCER, plan.producer), False)
        if len(readers) > 1:
            complain(f"{plan.transfer} was read by {readers}")
        if plan.twisted and readers:
            complain(f"{plan.transfer} is ok although its two sides were told different prompts")
        initiator_ok = producer if plan.mode is Mode.PUSH else bool(readers)
        target_ok = bool(readers) if plan.mode is Mode.PUSH else producer
        side = Role.CONSUMER if plan.mode is Mode.PUSH else Role.PRODUCER
        targets = [engine for (role, _), (engine, _) in sides.items() if role is side]
        if initiator_ok and not target_ok and not any(engine.dead for engine in targets):
            complain(f"{plan.transfer} is ok at its initiator only: {oks}")
        disturbed = any(self.places[name].disturbed for name in (plan.producer, *plan.consumers))
        if not disturbed and not self.fabric.climate.op_hangs_forever and producer != bool(readers):
            complain(f"the sides of {plan.transfer} do not agree: {oks}, {self._reasons(plan)}")
        if self.kind == "calm" and plan.whole and not (producer and readers):
            complain(f"{plan.transfer} failed in a calm world: {self._reasons(plan)}")

    def _reasons(self, plan: Plan) -> list[str]:
        return [
            f"{name}#{rank} {outcome.reason.value if outcome.reason else 'ok'}: {outcome.detail}"
            for (transfer, _, name), (_, job) in self.jobs.items()
            if transfer == plan.transfer
            for rank, outcome in sorted(job.outcomes.items())
        ]


def run_world(seed: int, trace: Callable[[str], None] | None = None) -> Summary:
    """Live through the world of this seed. Deterministic: the same seed gives the same summary and trace."""
    return World(seed, trace).run()
