"""Transfers that end well: whole, in parts, with prefix hits, over ranks, through slow networks."""

from __future__ import annotations

from kvx_conformance.actor import LAYERS, Shape
from kvx_conformance.catalogue.words import DEEP, PULL, PUSH, expose, moved, ok, shapes, stage
from kvx_conformance.scenarios import Act, Break, Fired, Heal, Plane, Scenario, Wait

MOVES = (
    Scenario("KVX-MOV-001", "push", (*moved("t", PUSH), *moved("u", PUSH)), ("J1",)),
    Scenario("KVX-MOV-002", "pull", (*moved("t", PULL), *moved("u", PULL)), ("J1",)),
    Scenario(
        "KVX-MOV-003",
        "push by layers: a layer leaves after it is computed",
        (
            expose(),
            stage(layers=LAYERS[:1], last=False),
            Wait("p", "moving"),
            stage(layers=LAYERS[1:2], last=False),
            stage(layers=LAYERS[2:]),
            *ok(),
        ),
        ("I4",),
    ),
    Scenario(
        "KVX-MOV-004",
        "push by chunks of the prompt: a chunk leaves after it is computed",
        (
            expose(),
            stage(stop=512, last=False),
            Wait("p", "moving"),
            stage(start=512, stop=1536, last=False),
            stage(start=1536),
            *ok(),
        ),
        ("I4",),
    ),
    Scenario(
        "KVX-MOV-005",
        "pull of what a prefix hit left over",
        (expose(mode=PULL), stage(mode=PULL, start=768), *ok()),
        ("H2",),
    ),
    Scenario("KVX-MOV-006", "push of what a prefix hit left over", (expose(start=768), stage(), *ok()), ("H2",)),
    Scenario(
        "KVX-MOV-007",
        "pull with a full prefix hit releases the producer",
        (expose(mode=PULL), stage(mode=PULL, start=2048), *ok()),
        ("H1",),
    ),
    Scenario(
        "KVX-MOV-008",
        "push with a full prefix hit releases the producer",
        (expose(start=2048), stage(), *ok()),
        ("H1",),
    ),
    Scenario("KVX-MOV-009", "push from two ranks to one", moved("t", PUSH), ("F3",), shapes(Shape(ranks=2), Shape())),
    Scenario("KVX-MOV-010", "pull from one rank by two", moved("t", PULL), ("F3",), shapes(Shape(), Shape(ranks=2))),
    Scenario(
        "KVX-MOV-011",
        "push to more ranks than there are heads",
        moved("t", PUSH),
        ("F6",),
        shapes(Shape(heads=1), Shape(ranks=2, heads=1)),
    ),
    Scenario(
        "KVX-MOV-012", "pull into smaller blocks", moved("t", PULL), ("F1",), shapes(Shape(), Shape(block_size=128))
    ),
    Scenario(
        "KVX-MOV-013",
        "the second turn moves the other way",
        (
            *moved("t", PUSH),
            expose("back", producer="d", consumer="p"),
            stage("back", producer="d", consumer="p"),
            *ok(transfer="back"),
        ),
    ),
    Scenario(
        "KVX-MOV-014",
        "no completion before the bytes: one of two connections stands still",
        (
            Break(Plane.DATA, "p", DEEP, Act.LANE),
            expose(),
            stage(),
            Fired(),
            *moved("u", PULL),
            Heal(),
            *ok(),
        ),
        ("J2",),
    ),
    Scenario(
        "KVX-MOV-015",
        "push through a slow network",
        (Break(Plane.DATA, "p", DEEP, Act.DELAY), *moved("t", PUSH)),
        ("J2",),
    ),
    Scenario(
        "KVX-MOV-016", "the grant is slow", (Break(Plane.CONTROL, "d", "GrantMessage", Act.DELAY), *moved("t", PUSH))
    ),
)
