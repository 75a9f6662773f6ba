"""The ground of a simulated world: its clock, its chance, and what is found wrong in it.

Everything that happens is an entry (time, sequence, action) of one heap, and all chance comes
from one `random.Random`, so a seed replays exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field

from kvx_conformance.climate import Climate

if TYPE_CHECKING:
    from kvx_conformance.fabric import Process


@define
class Clock:
    """The world's time and what is to happen in it."""

    rng: random.Random
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


@define(eq=False)
class Room:
    """What everything in one world shares."""

    rng: random.Random
    climate: Climate
    trace: Callable[[str], None] | None = None
    clock: Clock = field(init=False)
    violations: list[str] = field(factory=list)
    cuts: dict[frozenset[str], tuple[float, bool]] = field(factory=dict)  # instances -> (until, refuses)

    def __attrs_post_init__(self) -> None:
        self.clock = Clock(self.rng)

    def violation(self, text: str) -> None:
        self.violations.append(f"{self.clock.now:.3f}: {text}")
        self.say(f"VIOLATION {text}")

    def say(self, text: str) -> None:
        if self.trace:
            self.trace(f"{self.clock.now:10.4f} {text}")

    def soon(self, act: Callable[[], None]) -> None:
        self.clock.after(self.rng.expovariate(1 / 0.002), act)

    def delay(self) -> float:
        return self.rng.expovariate(1 / self.climate.latency_s)

    def cut_until(self, one: Process, two: Process) -> float | None:
        """When what lies between two processes lets something pass again; None: it does now."""
        until, _ = self.cuts.get(frozenset((one.info.instance, two.info.instance)), (0.0, False))
        return until if self.clock.now < until else None
