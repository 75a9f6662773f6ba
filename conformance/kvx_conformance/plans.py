"""What is to happen in one world: its climate, its instances' layouts, its requests. All drawn beforehand."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import evolve, frozen

from kvx.core.legs import Limits
from kvx.core.model import Layout, Mode, Role
from kvx_conformance.climate import Climate, capabilities_of, stretched
from kvx_conformance.toy_engine import counts, first_blocks

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


@frozen
class Plan:
    """One request as the router sees it. `need`: the first token that the consumer lacks."""

    transfer: str
    mode: Mode
    producer: str
    consumers: tuple[str, ...]
    content: int
    tokens: int
    need: int
    reaches: frozenset[Role]
    after: str | None = None
    """The turn of the conversation before this one: begins when that has ended well, roles swapped."""
    twisted: bool = False
    """Producer and consumer were told different prompts: it must fail, on both sides."""

    @property
    def whole(self) -> bool:
        return len(self.reaches) == 2 and len(self.consumers) == 1 and not self.twisted

    @property
    def names(self) -> tuple[str, ...]:
        return (self.producer, *self.consumers)

    def __str__(self) -> str:
        turn = f", the turn after {self.after}" if self.after else ""
        flaw = ", told differently" if self.twisted else ""
        lone = f", reaches its {next(iter(self.reaches)).value} only" if len(self.reaches) == 1 else ""
        sides = f"{self.producer} to {' and '.join(self.consumers)}"
        return f"{self.mode.value} of {self.tokens} tokens, from {self.need} on, {sides}{turn}{flaw}{lone}"


def draw_climate(rng: random.Random, kind: str) -> Climate:
    """Calm worlds and those of aborts alone have a network that works, but for messages that come twice."""
    calm = kind in ("calm", "aborts")
    limits = stretched(LIMITS, rng)
    if kind != "calm" and rng.random() < 0.1:
        limits = evolve(limits, transfers=rng.randrange(1, 5), tombstones=rng.randrange(1, 5))
    integrity = rng.random() < 0.4
    return Climate(
        capabilities=capabilities_of(rng),
        limits=limits,
        integrity=integrity,
        latency_s=rng.choice((0.001, 0.005, 0.05) if calm else (0.001, 0.02, 0.1, 0.3)),
        op_s=rng.choice((0.01, 0.1, 0.3) if calm else (0.01, 0.1, 0.5, 1.0)),
        op_fails=0.0 if calm else rng.choice((0.0, 0.0, 0.05, 0.2)),
        op_hangs=0.0 if calm else rng.choice((0.0, 0.1)),
        op_hangs_forever=rng.choice((0.0, 0.1)) if kind == "storm" else 0.0,
        corrupts=0.1 if integrity and not calm and rng.random() < 0.3 else 0.0,
        duplicates=rng.choice((0.0, 0.0, 0.02, 0.2)),
    )


def draw_plans(rng: random.Random, kind: str, names: Sequence[str]) -> list[Plan]:
    """A handful of requests, and for some of them the next turn of the same conversation."""
    plans: list[Plan] = []
    for number in range(rng.randrange(2, 7)):
        producer, consumer, *rest = rng.sample(sorted(names), len(names))
        mode = rng.choice(tuple(Mode))
        tokens = rng.randrange(1, 33)
        need = rng.choice((0, 0, 0, rng.randrange(tokens + 1), tokens))
        reaches = frozenset(Role)
        if rng.random() < 0.12:
            reaches = frozenset({rng.choice(tuple(Role)) if mode is Mode.PUSH else Role.PRODUCER})
        second_reader = mode is Mode.PULL and rest and rng.random() < 0.4
        twisted = kind != "calm" and rng.random() < 0.05
        consumers = (consumer, rest[0]) if second_reader else (consumer,)
        content = rng.getrandbits(31)
        plan = Plan(f"t{number}", mode, producer, consumers, content, tokens, need, reaches, twisted=twisted)
        plans.append(plan)
        if plan.whole and rng.random() < 0.25:
            longer = tokens + rng.randrange(1, 16)
            mode = rng.choice(tuple(Mode))
            turn = Plan(f"t{number}+", mode, consumer, (producer,), content, longer, tokens, reaches, plan.transfer)
            plans.append(turn)
    return plans


def need_of(plan: Plan, name: str, layout: Layout) -> tuple[int, ...]:
    """The first token wanted per group: the consumer has the rest, and a window group wants less."""
    if name == plan.producer:
        return tuple(0 for _ in layout.groups)
    sizes = [group.block_size for group in layout.groups]
    needs = [plan.need if plan.need >= plan.tokens else plan.need // size * size for size in sizes]
    if len(needs) > 1:
        needs[1] = max(needs[1], plan.tokens // 2 // sizes[1] * sizes[1])
    return tuple(needs)


def blocks_wanted(plan: Plan, name: str, layout: Layout) -> int:
    """How many blocks one side takes; a twisted prompt is one token longer."""
    tokens = plan.tokens + 1
    return sum(counts(layout, first_blocks(layout, need_of(plan, name, layout), tokens), tokens))


def sized(layout: Layout, blocks: int) -> Layout:
    """The same layout with a pool of this many blocks."""
    offset, groups = 0, []
    for group in layout.groups:
        layers = []
        for layer in group.layers:
            layers.append(evolve(layer, offset=offset))
            offset += layer.stride * blocks
        groups.append(evolve(group, layers=tuple(layers)))
    return evolve(layout, groups=tuple(groups), num_blocks=blocks)
