"""What befalls a simulated world: crashes, deaths, cuts, stalls, drains; most of it in the middle of a transfer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from kvx.core.events import Drain
from kvx.core.model import Role
from kvx_conformance.plans import Plan
from kvx_conformance.scenarios import Plane
from kvx_conformance.toy_engine import Engine

if TYPE_CHECKING:
    from kvx_conformance.sim import Place, World


@frozen
class Fault:
    """One fault: its kind, whom it strikes, and when: so long after the beginning, or after a side takes its work."""

    id: str
    kind: str
    names: tuple[str, ...]
    after: float
    upon: tuple[str, Role] | None = None

    def __str__(self) -> str:
        since = f"after {self.upon[0]} has begun at its {self.upon[1].value}" if self.upon else "after the beginning"
        return f"{self.kind} of {' and '.join(self.names)} {self.after:.2f} s {since}"


@define(eq=False)
class Ordeal:
    """All faults of one world."""

    _world: World
    _ambushes: list[Fault] = field(factory=list)
    """Those that strike a transfer while it moves."""

    def begin(self) -> None:
        """Draw what will happen and when."""
        if self._world.kind in ("calm", "aborts"):
            return
        for fault in self._draw():
            if not self._world.plays(fault.id, str(fault)):
                continue
            if fault.upon is None:
                self._world.clock.at(fault.after, partial(self._strike, fault))
            else:
                self._ambushes.append(fault)

    def _draw(self) -> Iterator[Fault]:
        world = self._world
        chance = 0.3 if world.kind == "faults" else 0.5
        for place in world.places.values():
            kinds = {"crash": chance, "stall": chance, "drain": 0.1, "death": chance if place.ranks > 1 else 0.0}
            for kind, likely in kinds.items():
                rng = world.chance("fault", kind, place.name)
                if rng.random() < likely:
                    yield Fault(f"{kind}-{place.name}", kind, (place.name,), self._moment(rng))
        for number in range(1, 4):
            rng = world.chance("fault", "cut", number)
            if rng.random() < chance / 2:
                yield Fault(f"cut-{number}", "cut", self._two(rng), self._moment(rng))
        for number in range(1, world.chance("ambushes").choice((0, 1, 1, 2)) + 1):
            yield self._ambush(number, world.chance("ambush", number))

    def _ambush(self, number: int, rng: random.Random) -> Fault:
        plan = rng.choice(self._world.plans)
        name, role = rng.choice(plan.names), rng.choice(tuple(Role))
        kinds = ["crash", "stall", "cut"] + ["death"] * (self._world.places[name].ranks > 1)
        kind = rng.choice(kinds)
        names = self._two(rng) if kind == "cut" else (name,)
        return Fault(f"{kind}-in-{plan.transfer}-{number}", kind, names, rng.uniform(0.0, 1.0), (plan.transfer, role))

    def _two(self, rng: random.Random) -> tuple[str, ...]:
        return tuple(rng.sample(sorted(self._world.places), 2))

    def _moment(self, rng: random.Random) -> float:
        return rng.uniform(0.0, self._world.span + 3)

    def moving(self, plan: Plan, role: Role) -> None:
        """One side of a transfer is about to move: some faults lie in wait for that."""
        for fault in [fault for fault in self._ambushes if fault.upon == (plan.transfer, role)]:
            self._ambushes.remove(fault)
            self._world.clock.after(fault.after, partial(self._strike, fault))

    def end(self) -> None:
        """Whoever cannot answer is started anew, so that every quarantine comes to its end."""
        for place in self._world.places.values():
            if any(process.ops or not process.alive for process in place.engine.processes):
                self._kill(place, vanishes=False)
            if place.engine.dead:
                self._restart(place)

    # ------------------------------------------------------------------- strikes

    def _strike(self, fault: Fault) -> None:
        rng, place = self._world.chance(fault.id), self._world.places[fault.names[0]]
        if fault.kind == "cut":
            self._cut(rng, *fault.names)
        elif not place.engine.dead:
            strikes = {"crash": self._crash, "death": self._death, "stall": self._stall, "drain": self._drain}
            strikes[fault.kind](rng, place)

    def _crash(self, rng: random.Random, place: Place) -> None:
        self._world.stats["crashes"] += 1
        self._kill(place, vanishes=rng.random() < 0.3)
        self._restart_some_time(rng, place)

    def _death(self, rng: random.Random, place: Place) -> None:
        """One rank dies alone; the engine ends some time later, as real ones do, and its other ranks with it."""
        self._world.stats["deaths"] += 1
        place.disturbed, engine = True, place.engine
        process, vanishes = rng.choice(engine.processes), rng.random() < 0.3
        self._world.fabric.say(f"DEATH of {process.name}{' without a word' if vanishes else ''}")
        self._world.fabric.kill(process, vanishes=vanishes)
        self._world.clock.after(rng.choice((0.05, 0.5, 3.0, 10.0)), lambda: self._follow(rng, place, engine))

    def _follow(self, rng: random.Random, place: Place, engine: Engine) -> None:
        if not engine.dead:
            self._kill(place, vanishes=False)
            self._restart_some_time(rng, place)

    def _kill(self, place: Place, *, vanishes: bool) -> None:
        self._world.fabric.say(f"CRASH of {place.name}{' without a word' if vanishes else ''}")
        place.disturbed = place.engine.dead = True
        for process in place.engine.processes:
            if process.alive:
                self._world.fabric.kill(process, vanishes=vanishes)

    def _restart_some_time(self, rng: random.Random, place: Place) -> None:
        if rng.random() < 0.8:
            self._world.clock.after(rng.choice((0.01, 0.5, 5.0)), lambda: self._restart(place))

    def _restart(self, place: Place) -> None:
        if not place.engine.dead:
            return
        self._world.stats["restarts"] += 1
        engine = self._world.start(place)
        self._world.fabric.say(f"RESTART of {place.name}")

        def replay() -> None:
            for process in engine.processes:
                if self._world.fabric.replay(process):
                    self._world.fabric.violation(f"a message of another epoch acted at {process.name}")

        for delay in (0.1, 1.0, 3.0):
            self._world.clock.after(delay, replay)

    def _stall(self, rng: random.Random, place: Place) -> None:
        self._world.stats["stalls"] += 1
        place.disturbed = True
        process = rng.choice(place.engine.processes)
        seconds = rng.choice((0.3, 2.0, 5.0, 15.0)) * rng.uniform(0.5, 1.5)
        self._world.stalled[process.name] = self._world.stalled.get(process.name, 0.0) + seconds
        self._world.fabric.say(f"STALL of {process.name} for {seconds:.2f} s")
        process.stall(seconds)

    def _cut(self, rng: random.Random, one: str, two: str) -> None:
        """Both ways or one, control or data or both; connections break, or stand still until it is over."""
        fabric = self._world.fabric
        self._world.stats["cuts"] += 1
        self._world.places[one].disturbed = self._world.places[two].disturbed = True
        ways = rng.choice((((one, two), (two, one)), ((one, two),)))
        planes = rng.choice((tuple(Plane), tuple(Plane), (Plane.CONTROL,), (Plane.DATA,)))
        seconds = rng.choice((0.0, 0.3, 2.0, 6.0, 20.0)) * rng.uniform(0.5, 1.5)
        breaks, alone = rng.random() < 0.5, rng.random() < 0.2
        what = "connection" if alone else " and ".join(plane.value for plane in planes)
        paths = " and ".join(f"{sender} to {receiver}" for sender, receiver in ways)
        fabric.say(f"CUT of {what} from {paths} for {seconds:.2f} s, {'broken' if breaks else 'frozen'}")
        until = fabric.clock.now + seconds
        if alone:
            links = fabric.between(one, two)[:1]
            for link in links:
                fabric.freeze(link, ways, until)
        else:
            links = fabric.cut(ways, planes, seconds)
        for link in links:
            if breaks:
                fabric.break_wire(link)
            elif rng.random() < 0.4:
                fabric.clock.at(until, partial(fabric.break_wire, link))

    def _drain(self, rng: random.Random, place: Place) -> None:
        grace = rng.choice((0.0, 1.0, 10.0))
        for process in place.engine.processes:
            process.feed(Drain(grace))
