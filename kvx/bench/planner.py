"""How long the planner takes to turn the blocks of one request into descriptors. No byte is moved.

`fresh` is a request in contiguous blocks on both sides, the best case; `fragmented` one whose
blocks are scattered on both sides, as under prefix reuse: no two of its pieces can be merged.
`random` is a request in short runs of blocks, cut and placed at random on each side.

Each case is planned in turns with a plain loop in Python that does the same. Both have to find the same ranges, as
few as an independent count says that there can be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypedDict

import numpy as np

from kvx.core.layout import plan_leg
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Packing, Part
from kvx.report import summary

CASES = ("fresh", "fragmented", "random")
LONGEST = 8
"""Blocks in a run of case `random`, at most."""
Range = list[int]
"""Producer's region and offset, consumer's region and offset, length."""


class Result(TypedDict):
    """`pieces` before and `descriptors` after merging; `ms` sums up the `samples`, the times of `LegPlan.move`.

    `loop_ms` are those of the plain loop, `faster` is the median of its time over the planner's in the same turn.
    """

    case: str
    blocks: int
    layers: int
    pieces: int
    descriptors: int
    ms: dict[str, float]
    loop_ms: dict[str, float]
    faster: float
    samples: list[float]


class Report(TypedDict):
    results: list[Result]


class Floor(TypedDict):
    """`value` is at most `limit`, or with `least` at least."""

    name: str
    limit: float
    value: float
    least: bool
    met: bool


class Floors(TypedDict):
    load: float
    results: list[Result]
    unequal_tp: list[dict[str, float]]
    floors: list[Floor]


def run(
    blocks: int = 1024,
    layers: int = 32,
    cases: Sequence[str] = CASES,
    block_bytes: int = 65536,
    repeat: int = 25,
) -> Report:
    """Plan one request of `blocks` blocks in `layers` layers, `repeat` times per case.

    Raises ValueError for an unknown case or a number below one.
    """
    if unknown := set(cases) - set(CASES):
        raise ValueError(f"no such case: {', '.join(sorted(unknown))} (there are {', '.join(CASES)})")
    if min(blocks, layers, block_bytes, repeat) < 1:
        raise ValueError("blocks, layers, block_bytes and repeat are at least 1")
    layout = _layout(4 * blocks, layers, block_bytes)
    return {"results": [_measured(case, layout, blocks, repeat) for case in cases]}


def _layout(num_blocks: int, layers: int, block_bytes: int) -> Layout:
    specs = tuple(LayerSpec(f"layer.{index}", index, 0, block_bytes, block_bytes) for index in range(layers))
    group = CacheGroup(0, "full", 16, specs, heads=1, total_heads=1, packing=Packing.WHOLE)
    return Layout("bench", "bytes", "bench", (group,), num_blocks)


def _part(case: str, blocks: int, seed: int) -> Part:
    draw = np.random.default_rng(seed)
    if case == "fresh":
        ids = np.arange(blocks) + seed
    elif case == "fragmented":
        # Every second block of the pool, shuffled: no neighbours at all.
        ids = draw.permutation(2 * blocks)[:blocks] * 2
    else:
        runs = np.split(np.arange(blocks), np.cumsum(draw.integers(1, LONGEST, blocks, endpoint=True)))
        ids = np.concatenate([runs[run] for run in draw.permutation(len(runs))])
    return Part(None, (0,), BlockTable.of(ids.tolist()))


def _measured(case: str, layout: Layout, blocks: int, repeat: int) -> Result:
    leg, producer, consumer = plan_leg(layout, layout), _part(case, blocks, 1), _part(case, blocks, 2)
    here, there = leg.move(producer, consumer)
    layers = len(layout.groups[0].layers)
    columns = (here.region, here.offset, there.region, there.offset, there.length)
    ranges = [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    looped = plain_loop(layout, producer, consumer)
    least = layers * least_runs(producer, consumer)
    if sorted(ranges) != sorted(looped) or len(here) != least:
        raise AssertionError(f"{len(here)} ranges planned, {len(looped)} by the loop, {least} are needed")
    samples, loop = [], []
    for _ in range(repeat):
        samples.append(_ms(lambda: leg.move(producer, consumer)))
        loop.append(_ms(lambda: plain_loop(layout, producer, consumer)))
    return Result(
        case=case,
        blocks=blocks,
        layers=layers,
        pieces=layers * blocks,
        descriptors=len(here),
        ms=summary(samples),
        loop_ms=summary(loop),
        faster=float(np.median(np.array(loop) / np.array(samples))),
        samples=samples,
    )


def plain_loop(layout: Layout, producer: Part, consumer: Part) -> list[Range]:
    """What the planner does where both sides have this layout, of one group, block by block."""
    pairs = sorted(zip(producer.blocks.groups[0], consumer.blocks.groups[0], strict=True))
    for pair in pairs:
        for block in pair:
            if not 0 <= block < layout.num_blocks:
                raise ValueError(f"block {block} of {layout.num_blocks}")
    ranges: list[Range] = []
    for layer in layout.groups[0].layers:
        end = None
        for ours, theirs in pairs:
            here, there = layer.offset + ours * layer.stride, layer.offset + theirs * layer.stride
            if end == (here, there):
                ranges[-1][4] += layer.block_bytes
            else:
                ranges.append([layer.region, here, layer.region, there, layer.block_bytes])
            end = here + layer.block_bytes, there + layer.block_bytes
    return ranges


def least_runs(producer: Part, consumer: Part) -> int:
    """A range begins at each pair of blocks whose two predecessors are not a pair: fewer there cannot be."""
    pairs = set(zip(producer.blocks.groups[0], consumer.blocks.groups[0], strict=True))
    return sum((ours - 1, theirs - 1) not in pairs for ours, theirs in pairs)


def floors(repeat: int = 25) -> Floors:
    """The cases that have a bar, and how the time grows with the pieces where two ranks fill one."""
    load = os.getloadavg()[0]
    wide = run(131_072, 1, ("fresh", "random"), repeat=repeat)["results"]
    deep = run(4096, 32, ("random",), repeat=repeat)["results"]
    fresh = run(1024, 32, ("fresh",), repeat=repeat)["results"]
    unequal = [_unequal(blocks, repeat) for blocks in (1024, 4096)]
    growth = unequal[1]["us_per_piece"] / unequal[0]["us_per_piece"]
    rows = [
        ("random, 131,072 blocks, ms", 20, wide[1]["ms"]["median"], False),
        ("random, 131,072 blocks, times a plain loop", 5, wide[1]["faster"], True),
        ("random, 4,096 blocks x 32 layers, ms", 5, deep[0]["ms"]["median"], False),
        ("random, 4,096 blocks x 32 layers, times a plain loop", 20, deep[0]["faster"], True),
        ("fresh, 1,024 blocks x 32 layers, ms", 1, fresh[0]["ms"]["median"], False),
        ("two ranks to one, four times the pieces, time of a piece", 1.5, growth, False),
    ]
    met = [value >= limit if least else value <= limit for _, limit, value, least in rows]
    return Floors(
        load=load,
        results=[*wide, *deep, *fresh],
        unequal_tp=unequal,
        floors=[
            Floor(name=name, limit=limit, value=value, least=least, met=good)
            for (name, limit, value, least), good in zip(rows, met, strict=True)
        ],
    )


def _unequal(blocks: int, repeat: int) -> dict[str, float]:
    """Blocks `[token][head]` of a producer with half of the heads: each token of each block is a piece."""
    tokens, head_bytes = 16, 256

    def layout(heads: int, size: int) -> Layout:
        layer = LayerSpec("layer.0", 0, 0, tokens * heads * head_bytes, tokens * heads * head_bytes)
        group = CacheGroup(0, "full", tokens, (layer,), heads, 8, Packing.TOKENS_HEADS)
        return Layout("bench", "bytes", "bench", (group,), 2 * blocks + 8, tp_size=size)

    leg = plan_leg(layout(4, 2), layout(8, 1))
    producer, consumer = _part("random", blocks, 1), _part("random", blocks, 2)
    pieces = len(leg.move(producer, consumer)[0])
    median = float(np.median([_ms(lambda: leg.move(producer, consumer)) for _ in range(repeat)]))
    return {"blocks": blocks, "pieces": pieces, "ms": median, "us_per_piece": 1000 * median / pieces}


def _ms(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1000


def lines(fields: Mapping[str, Any]) -> list[str]:
    """What `run` or `floors` returned, for a person."""
    rows = [
        f"{row['case']:<12} {row['pieces']:>8} pieces {row['descriptors']:>8} descriptors "
        f"{row['ms']['median']:8.3f} ms, {row['faster']:.1f} times a plain loop"
        for row in fields["results"]
    ]
    for floor in fields.get("floors", ()):
        bar = f"at {'least' if floor['least'] else 'most'} {floor['limit']:g}"
        rows.append(f"{'met ' if floor['met'] else 'MISS'} {floor['name']}: {floor['value']:.2f} ({bar})")
    return rows
