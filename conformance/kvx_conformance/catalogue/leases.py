"""What ends by time."""

from __future__ import annotations

from kvx_conformance.catalogue.words import DEEP, NEXT_PULL, NEXT_PUSH, PULL, R, claim, expose, failed, ok, stage
from kvx_conformance.scenarios import Act, Break, Fired, Heal, Plane, Scenario

LEASES = (
    Scenario(
        "KVX-LSE-001", "a ticket that nobody uses", (expose(mode=PULL), failed("p", R.LEASE_ENDED), *NEXT_PULL), ("K1",)
    ),
    Scenario(
        "KVX-LSE-002",
        "a claimed ticket waits longer than its lease, beside one with a shorter lease that nobody claims",
        (
            expose(mode=PULL),
            claim("d", mode=PULL),
            expose("u", PULL, lease_s=5.0),
            failed("p", R.LEASE_ENDED, transfer="u"),
            stage(mode=PULL),
            *ok(),
        ),
        ("K1",),
    ),
    Scenario(
        "KVX-LSE-003",
        "a push whose request never reaches the producer",
        (expose(), failed("d", R.LEASE_ENDED), *NEXT_PUSH),
        ("C8",),
    ),
    Scenario(
        "KVX-LSE-004",
        "a read straddles the end of its lease: it is not used",
        (
            expose(mode=PULL),
            Break(Plane.DATA, "p", DEEP, Act.HOLD),
            stage(mode=PULL),
            Fired(),
            Break(Plane.CONTROL, "d", "Renew", Act.HOLD),
            Fired(),
            failed("p", R.LEASE_ENDED),
            Heal(),
            failed("d", R.LEASE_ENDED, R.PEER_LOST, R.OVERDUE),
            *NEXT_PULL,
        ),
        ("B9",),
    ),
    Scenario(
        "KVX-LSE-005",
        "the next part of a push does not come",
        (
            expose(),
            stage(stop=512, last=False),
            failed("p", R.PATIENCE, released=False),
            failed("d", R.PATIENCE),
            stage(start=512),
            failed("p", R.PATIENCE),
            *NEXT_PUSH,
        ),
        ("G3",),
    ),
    Scenario("KVX-LSE-006", "a push without a grant", (stage(), failed("p", R.PATIENCE)), ("C8",)),
)
