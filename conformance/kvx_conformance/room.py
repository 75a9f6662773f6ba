"""The ground of a simulated world: its clock, its chance, and what is found wrong in it.

Everything that happens is an entry (time, sequence, action) of one heap. Chance comes in streams
that have names and are made from the seed, so a seed replays exactly, and what is left out of a
world changes nothing that others draw.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from kvx_conformance.climate import Climate
from kvx_conformance.scenarios import Plane

if TYPE_CHECKING:
    from kvx_conformance.fabric import Process


@define
class Clock:
    """The world's time and what is to happen in it."""

    now: float = 0.0
    steps: int = 0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(factory=list)
    _sequence: int = 0

    def at(self, moment: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._sequence, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def step(self, until: float) -> bool:
        """Let the next thing happen; False if there is none before `until`."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, act = heapq.heappop(self._heap)
        self.steps += 1
        act()
        return True


@frozen
class Note:
    """What happened: a process heard (`<-`) or did (`->`) something, or a sentence about the world."""

    moment: float
    who: str
    arrow: str
    what: object

    def __str__(self) -> str:
        said = f"{self.who} {self.arrow} {self.what!r}" if self.who else str(self.what)
        return f"{self.moment:10.4f} {said}"


def streams(seed: int) -> Callable[..., random.Random]:
    """Chance by name: the same name gives the same stream, whatever was drawn under another."""
    known: dict[tuple[object, ...], random.Random] = {}

    def chance(*name: object) -> random.Random:
        stream = known.get(name)
        if stream is None:
            stream = known[name] = random.Random(" ".join(map(str, (seed, *name))))  # noqa: S311 - a world, not a key
        return stream

    return chance


@define(eq=False)
class Room:
    """What everything in one world shares."""

    chance: Callable[..., random.Random]
    climate: Climate
    trace: Callable[[Note], None] | None = None
    clock: Clock = field(factory=Clock)
    violations: list[str] = field(factory=list)
    cuts: dict[tuple[str, str, Plane], float] = field(factory=dict)
    """(From instance, to instance, plane) -> until when nothing passes."""

    def violation(self, text: str) -> None:
        self.violations.append(f"{self.clock.now:.3f}: {text}")
        self.say(f"VIOLATION {text}")

    def say(self, text: str) -> None:
        if self.trace:
            self.trace(Note(self.clock.now, "", "", text))

    def soon(self, rng: random.Random, act: Callable[[], None]) -> None:
        self.clock.after(rng.expovariate(1 / 0.002), act)

    def delay(self, rng: random.Random) -> float:
        return rng.expovariate(1 / self.climate.latency_s)

    def held_until(self, plane: Plane, sender: Process, receiver: Process) -> float | None:
        """When something can get from one process to the other again; None: it does now."""
        until = self.cuts.get((sender.info.instance, receiver.info.instance, plane), 0.0)
        return until if self.clock.now < until else None
