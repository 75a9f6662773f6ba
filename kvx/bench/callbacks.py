"""What an adapter costs its engine in each step, with many transfers open and while bytes move.

The adapter's own halves run on real instances, driven without their engine: every call that one step
makes is timed as one sum. Instances that differ in the number of open transfers take turns; moving
loads are pushed by a second process, and their bytes are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

from attrs import define, frozen

from kvx import plugins
from kvx.bench.cache import Cache, new_cache, pattern
from kvx.bench.child import ANSWER_S, Child
from kvx.config import Options
from kvx.core.errors import PluginError, TransportError
from kvx.core.model import Layout, Region
from kvx.engine import EngineInstance
from kvx.instance import open_instance
from kvx.report import summary

OPEN = (0, 100, 10_000)
"""Numbers of open transfers. An instance takes 20,000."""
LIMIT_US = {False: 150.0, True: 500.0}
"""Floor: the p99 of one step's calls, idle and while bytes move. Microseconds."""
GROWTH = 2.0
"""Floor: the median from none to most open transfers."""
LOADS = 1_000_000
"""More than one instance loads."""
HOLD_S = 300.0
"""How long the open transfers of one instance may take to begin: 1 ms each, more on a busy machine."""
FORWARD_S = 0.001
"""Between two steps the engine's thread waits for its device."""


class Steps(Protocol):
    """An adapter on one rank, driven as its engine drives it."""

    @property
    def layout(self) -> Layout: ...

    @property
    def regions(self) -> Sequence[Region]: ...

    def start(self, instance: EngineInstance, options: Options) -> None:
        """`instance` was opened with `layout` and `regions`."""
        ...

    def hold(self, count: int, block: int, address: str) -> None:
        """`count` requests whose transfers, of this one block, nobody takes up. `address`: a producer's."""
        ...

    def load(self, number: int, blocks: Sequence[int], address: str) -> None:
        """A request begins that waits for all of these blocks from the producer at `address`.

        `number` is one that no load with this producer has had.
        """
        ...

    def step(self) -> int:
        """Each call that one step of the engine makes; how many loads it was told of. Raises TransportError: failed."""
        ...

    def leave(self) -> None:
        """The requests whose loads are over end."""
        ...


@runtime_checkable
class HasSteps(Protocol):
    """What a driver may have beside `kvx.driver.EngineDriver`: then this bench can measure its adapter."""

    def steps(self, cache: Cache) -> Steps: ...


@frozen
class Shape:
    """Of a load: `layers * blocks * block_bytes` bytes. The pool has one block more, which open transfers share."""

    layers: int = 16
    blocks: int = 64
    block_bytes: int = 65536

    @property
    def pool(self) -> int:
        return self.blocks + 1

    @property
    def nbytes(self) -> int:
        return self.layers * self.blocks * self.block_bytes


def options_of(instance: str) -> Options:
    """Nothing that is open may end by time while others are measured."""
    settings = {"listen": "127.0.0.1:0", "instance": instance, "lease_s": 600, "patience_s": 3600}
    return Options.load({**settings, "transfer_max_s": 3600, "max_held_fraction": 1.0}, env={})


@define
class _Rig:
    """One instance with its adapter and `opened` open transfers."""

    opened: int
    steps: Steps
    instance: EngineInstance
    cache: Cache
    shape: Shape
    address: str
    loads: int = 0

    def begin(self) -> None:
        self.loads += 1
        number = self.opened * LOADS + self.loads
        self.steps.load(number, range(self.shape.blocks), self.address)

    def measure(self, count: int, *, moving: bool) -> list[tuple[float, float]]:
        """Microseconds of `count` steps, by the clock and by this thread's; while `moving`, a load is open in each."""
        if moving:
            self.begin()
        samples = []
        for _ in range(count):
            start, worked = time.perf_counter_ns(), time.thread_time_ns()
            ended = self.steps.step()
            worked, took = time.thread_time_ns() - worked, time.perf_counter_ns() - start
            samples.append((took / 1000, worked / 1000))
            if ended:
                self.steps.leave()
                self.begin()
            time.sleep(FORWARD_S)
        if moving:
            self._until_loaded()
            self.steps.leave()
        return samples

    def _until_loaded(self) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not self.steps.step():
            if time.monotonic() > deadline:
                raise TransportError(f"a load has not ended in {ANSWER_S:g} s")
            time.sleep(FORWARD_S)

    def hold(self) -> None:
        self.steps.hold(self.opened, self.shape.blocks, self.address)
        deadline = time.monotonic() + HOLD_S
        while len(_table(self.instance.snapshot()["open"])) < self.opened:
            if time.monotonic() > deadline:
                raise TransportError(f"{self.opened} transfers are not open after {HOLD_S:g} s")
            self.steps.step()
            time.sleep(0.05)

    @property
    def verified(self) -> bool:
        """Every block holds what the producer's does; True where nothing was loaded."""
        shape = self.shape
        return not self.loads or all(
            (self.cache[layer, : shape.blocks] == pattern(layer, shape.blocks, shape.block_bytes, 0)).all()
            for layer in range(shape.layers)
        )


def _table(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def run(
    engine: str = "reference",
    opened: Sequence[int] = OPEN,
    moving: Sequence[bool] = (False, True),
    shape: Shape | None = None,
    rounds: int = 50,
    steps: int = 40,
) -> dict[str, Any]:
    """`rounds * steps` steps for each number of open transfers and each of `moving`, in turns.

    Returns `results: [{open, moving, step_us, cpu_us, samples}]`, `floors: [{name, limit, value, met}]`, `verified`
    and `load`, the machine's load average before; cpu_us leaves out what other threads and processes took. Raises
    PluginError for an engine whose adapter cannot be driven so, TransportError for a load that fails, ValueError for a
    number that cannot be.
    """
    if rounds < 1 or steps < 1 or min(opened) < 0:
        raise ValueError("rounds and steps are at least 1, open at least 0")
    load = os.getloadavg()[0]
    driver = plugins.load().driver(engine)
    if not isinstance(driver, HasSteps):
        raise PluginError(f"the adapter of engine {engine!r} cannot be driven without its engine")
    shape = shape or Shape()
    setup = {"engine": engine, "shape": [shape.layers, shape.blocks, shape.block_bytes]}
    samples: dict[tuple[int, bool], list[tuple[float, float]]] = {
        (count, move): [] for count in opened for move in moving
    }
    with ExitStack() as stack:
        address = str(stack.enter_context(Child("kvx.bench.producer", setup)).hello["address"])
        rigs = [stack.enter_context(_rig(driver, count, shape, address)) for count in opened]
        for turn in range(rounds + 1):
            for rig in rigs:
                for move in moving:
                    taken = rig.measure(steps, moving=move)
                    if turn:  # the first turn dials and touches memory
                        samples[rig.opened, move] += taken
        verified = all(rig.verified for rig in rigs)
    results = [
        {"open": count, "moving": move}
        | {"step_us": summary([clock for clock, _ in taken]), "cpu_us": summary([cpu for _, cpu in taken])}
        | {"samples": [round(clock, 1) for clock, _ in taken]}
        for (count, move), taken in samples.items()
    ]
    fields: dict[str, Any] = {"engine": engine, "bytes": shape.nbytes, "load": load}
    return {**fields, "results": results, "floors": floors(results), "verified": verified}


@contextmanager
def _rig(driver: HasSteps, opened: int, shape: Shape, address: str) -> Generator[_Rig]:
    cache = new_cache(shape.layers, shape.pool, shape.block_bytes)
    steps = driver.steps(cache)
    options = options_of(f"bench-{opened}")
    instance = open_instance(options, steps.layout, steps.regions, epoch=opened + 1)
    try:
        steps.start(instance, options)
        rig = _Rig(opened, steps, instance, cache, shape, address)
        rig.hold()
        yield rig
    finally:
        instance.close()


def floors(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The p99 of each row, and what most open transfers add to the median."""
    rows = []
    for result in results:
        state = "moving" if result["moving"] else "idle"
        limit, value = LIMIT_US[result["moving"]], result["step_us"]["p99"]
        rows.append({"name": f"p99 {state}, {result['open']} open, us", "limit": limit, "value": value})
    for moving in (False, True):
        medians = {row["open"]: row["step_us"]["median"] for row in results if row["moving"] is moving}
        if len(medians) > 1:
            growth = medians[max(medians)] / medians[min(medians)]
            state = "moving" if moving else "idle"
            name = f"median {state}, {max(medians)} open over {min(medians)} open"
            rows.append({"name": name, "limit": GROWTH, "value": growth})
    return [{**row, "met": row["value"] <= row["limit"]} for row in rows]


def lines(fields: Mapping[str, Any]) -> list[str]:
    """What `run` returned, for a person."""
    rows = [
        f"{row['open']:>6} open  {'moving' if row['moving'] else 'idle':<6} "
        f"{row['step_us']['median']:8.1f} us median {row['step_us']['p99']:8.1f} p99 {row['step_us']['max']:8.1f} max"
        for row in fields["results"]
    ]
    rows += [
        f"{'met ' if floor['met'] else 'MISS'} {floor['name']}: {floor['value']:.1f} (at most {floor['limit']:g})"
        for floor in fields["floors"]
    ]
    return rows if fields["verified"] else [*rows, "WRONG BYTES"]
