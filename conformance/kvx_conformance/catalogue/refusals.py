"""What is refused: used and foreign tickets, other models and secrets, gaps, hostile bytes."""

from __future__ import annotations

from kvx_conformance.actor import LAYERS, Call, Shape
from kvx_conformance.catalogue.words import (
    NEXT_PULL,
    NEXT_PUSH,
    PULL,
    PUSH,
    SECRET,
    R,
    claim,
    expose,
    failed,
    half_way,
    moved,
    ok,
    shapes,
    stage,
)
from kvx_conformance.scenarios import Garbage, Heal, Scenario, Wait

REFUSALS = (
    Scenario(
        "KVX-REF-001",
        "a used ticket is shown by another reader: refused, no byte moves",
        (*moved("t", PULL), stage(mode=PULL, consumer="e"), failed("e", R.UNKNOWN_TRANSFER)),
        ("B7",),
        {"p": Shape(), "d": Shape(), "e": Shape()},
    ),
    Scenario(
        "KVX-REF-002",
        "two readers of one ticket: the first one has it",
        (
            expose(mode=PULL),
            claim("d", mode=PULL),
            Wait("d", "granted"),
            stage(mode=PULL, consumer="e"),
            failed("e", R.UNKNOWN_TRANSFER),
            stage(mode=PULL),
            *ok(),
        ),
        ("B7",),
        {"p": Shape(), "d": Shape(), "e": Shape()},
    ),
    Scenario(
        "KVX-REF-003",
        "another model: both sides are told",
        (expose(), stage(), failed("d", R.LAYOUT), failed("p", R.LAYOUT, R.PATIENCE)),
        ("C8",),
        shapes(Shape(), Shape(model="other")),
    ),
    Scenario(
        "KVX-REF-004",
        "another secret",
        (expose(mode=PULL), stage(mode=PULL), failed("d", R.AUTH), failed("p", R.LEASE_ENDED)),
        ("C8",),
        secrets={"p": SECRET, "d": SECRET[::-1]},
    ),
    Scenario(
        "KVX-REF-005",
        "the last part lacks a layer: never ready",
        (expose(), stage(layers=LAYERS[:2]), failed("p", R.BOUNDS), failed("d", R.BOUNDS), *NEXT_PUSH),
        ("G3",),
    ),
    Scenario(
        "KVX-REF-006",
        "the prompts differ",
        (expose(), stage(tokens=1990), failed("p", R.BOUNDS), failed("d", R.BOUNDS), *NEXT_PUSH),
        ("G3",),
    ),
    Scenario(
        "KVX-REF-007",
        "drain: the open transfer ends well, a new one is refused",
        (
            expose(mode=PULL),
            Call("p", "drain", lease_s=10.0),
            expose("u", PULL),
            failed("p", R.DRAINING, transfer="u"),
            stage(mode=PULL),
            *ok(),
        ),
        ("D8",),
    ),
    Scenario(
        "KVX-REF-008",
        "hostile bytes on every socket, before and during a transfer",
        (Garbage("p"), Garbage("d"), *half_way(PUSH), Garbage("p"), Garbage("d"), Heal(), *ok(), *NEXT_PULL),
        ("O1",),
    ),
    Scenario(
        "KVX-REF-009",
        "with a shared secret",
        (*moved("t", PUSH), *moved("u", PULL)),
        ("O1",),
        secrets={"p": SECRET, "d": SECRET},
    ),
)
