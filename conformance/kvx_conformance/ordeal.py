"""What befalls a simulated world: crashes, cuts, stalls and drains, most of them in the middle of a transfer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import define

from kvx.core.events import Drain
from kvx_conformance.plans import Plan

if TYPE_CHECKING:
    from kvx_conformance.sim import Place, World


@define(eq=False)
class Ordeal:
    """All faults of one world."""

    _world: World
    _ambushes: int = 0
    """How many transfers will be struck while they move."""

    def begin(self) -> None:
        """Draw what will happen and when."""
        rng, world = self._world.rng, self._world
        if world.kind in ("calm", "aborts"):
            return
        chance = 0.3 if world.kind == "faults" else 0.5
        for place in world.places.values():
            for act, likely in ((self._crash, chance), (self._stall, chance), (self._drain, 0.1)):
                if rng.random() < likely:
                    world.clock.at(self._moment(), partial(act, place))
        for _ in range(rng.randrange(4)):
            if rng.random() < chance:
                world.clock.at(self._moment(), self._cut)
        self._ambushes = rng.choice((0, 1, 1, 2))

    def _moment(self) -> float:
        return self._world.rng.uniform(0.0, self._world.span + 3)

    def moving(self, plan: Plan) -> None:
        """A transfer is about to move: some faults lie in wait for that."""
        rng, world = self._world.rng, self._world
        if not self._ambushes or rng.random() < 0.5:
            return
        self._ambushes -= 1
        place = world.places[rng.choice(plan.names)]
        act = rng.choice((partial(self._crash, place), partial(self._stall, place), self._cut))
        world.clock.after(rng.uniform(0.0, 1.0), act)

    def end(self) -> None:
        """Whoever cannot answer is started anew, so that every quarantine comes to its end."""
        for place in self._world.places.values():
            if any(process.ops for process in place.engine.processes):
                self._kill(place, vanishes=False)
            if place.engine.dead:
                self._restart(place)

    def _crash(self, place: Place) -> None:
        if place.engine.dead:
            return
        self._world.stats["crashes"] += 1
        self._kill(place, vanishes=self._world.rng.random() < 0.3)
        if self._world.rng.random() < 0.8:
            self._world.clock.after(self._world.rng.choice((0.01, 0.5, 5.0)), lambda: self._restart(place))

    def _kill(self, place: Place, *, vanishes: bool) -> None:
        self._world.fabric.say(f"CRASH of {place.name}{' without a word' if vanishes else ''}")
        place.disturbed = place.engine.dead = True
        for process in place.engine.processes:
            self._world.fabric.kill(process, vanishes=vanishes)

    def _restart(self, place: Place) -> None:
        if not place.engine.dead:
            return
        engine = self._world.start(place)
        self._world.fabric.say(f"RESTART of {place.name}")

        def replay() -> None:
            for process in engine.processes:
                if self._world.fabric.replay(process):
                    self._world.fabric.violation(f"a message of another epoch acted at {process.name}")

        for delay in (0.1, 1.0, 3.0):
            self._world.clock.after(delay, replay)

    def _stall(self, place: Place) -> None:
        if place.engine.dead:
            return
        self._world.stats["stalls"] += 1
        place.disturbed = True
        process = self._world.rng.choice(place.engine.processes)
        seconds = self._world.rng.choice((0.3, 2.0, 5.0, 15.0)) * self._world.rng.uniform(0.5, 1.5)
        self._world.stalled[process.name] = self._world.stalled.get(process.name, 0.0) + seconds
        self._world.fabric.say(f"STALL of {process.name} for {seconds:.2f} s")
        process.stall(seconds)

    def _cut(self) -> None:
        one, two = self._world.rng.sample(sorted(self._world.places), 2)
        self._world.stats["cuts"] += 1
        self._world.places[one].disturbed = self._world.places[two].disturbed = True
        seconds = self._world.rng.choice((0.0, 0.3, 2.0, 6.0, 20.0)) * self._world.rng.uniform(0.5, 1.5)
        breaks = self._world.rng.random() < 0.6
        self._world.fabric.say(f"CUT between {one} and {two} for {seconds:.2f} s, {'broken' if breaks else 'frozen'}")
        if not breaks and self._world.rng.random() < 0.4:
            for link in self._world.fabric.between(one, two)[:1]:
                link.frozen_until = self._world.clock.now + seconds
            return
        self._world.fabric.cut(one, two, seconds, breaks=breaks)

    def _drain(self, place: Place) -> None:
        if place.engine.dead:
            return
        grace = self._world.rng.choice((0.0, 1.0, 10.0))
        for process in place.engine.processes:
            process.feed(Drain(grace))
