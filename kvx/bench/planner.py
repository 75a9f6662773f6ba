"""How long the planner takes to turn the blocks of one request into descriptors. No byte is moved.

`fresh` is a request in contiguous blocks on both sides, the best case; `fragmented` one whose
blocks are scattered on both sides, as under prefix reuse: no two of its pieces can be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypedDict

import numpy as np

from kvx.core.layout import LegPlan, plan_leg
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Packing, Part, Role
from kvx.report import summary

CASES = ("fresh", "fragmented")


class Result(TypedDict):
    """`pieces` before and `descriptors` after merging; `ms` sums up the `samples`, the times of `LegPlan.move`."""

    case: str
    pieces: int
    descriptors: int
    ms: dict[str, float]
    samples: list[float]


class Report(TypedDict):
    results: list[Result]


def run(
    blocks: int = 1024,
    layers: int = 32,
    cases: Sequence[str] = CASES,
    block_bytes: int = 65536,
    repeat: int = 100,
) -> Report:
    """Plan one request of `blocks` blocks in `layers` layers, `repeat` times per case.

    Raises ValueError for an unknown case or a number below one.
    """
    if unknown := set(cases) - set(CASES):
        raise ValueError(f"no such case: {', '.join(sorted(unknown))} (there are {', '.join(CASES)})")
    if min(blocks, layers, block_bytes, repeat) < 1:
        raise ValueError("blocks, layers, block_bytes and repeat are at least 1")
    layout = _layout(4 * blocks, layers, block_bytes)
    leg = plan_leg(layout, layout)
    return {"results": [_measured(case, leg, _part(case, blocks, 1), _part(case, blocks, 2), repeat) for case in cases]}


def _layout(num_blocks: int, layers: int, block_bytes: int) -> Layout:
    specs = tuple(LayerSpec(f"layer.{index}", index, 0, block_bytes, block_bytes) for index in range(layers))
    group = CacheGroup(0, "full", 16, specs, heads=1, total_heads=1, packing=Packing.WHOLE)
    return Layout("bench", "bytes", "bench", (group,), num_blocks)


def _part(case: str, blocks: int, seed: int) -> Part:
    if case == "fresh":
        ids = np.arange(blocks) + seed
    else:
        # Every second block of the pool, shuffled: no neighbours at all.
        ids = np.random.default_rng(seed).permutation(2 * blocks)[:blocks] * 2
    return Part(None, (0,), BlockTable.of(ids.tolist()))


def _measured(case: str, leg: LegPlan, producer: Part, consumer: Part, repeat: int) -> Result:
    here, there = leg.move(producer, consumer)
    pieces, _ = leg.units(Role.PRODUCER, producer)
    if not here.nbytes == there.nbytes == pieces.nbytes:
        raise AssertionError(f"{here.nbytes} bytes planned of {pieces.nbytes}")
    samples = [_ms(lambda: leg.move(producer, consumer)) for _ in range(repeat)]
    return Result(case=case, pieces=len(pieces), descriptors=len(here), ms=summary(samples), samples=samples)


def _ms(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1000
