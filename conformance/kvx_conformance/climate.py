"""What a simulated world's transport can do, what may go wrong in it, and how long its waits are."""

from __future__ import annotations

import random

from attrs import evolve, frozen

from kvx.core.legs import Limits
from kvx.core.model import Access, Capabilities, FenceScope, Op


@frozen
class Climate:
    """What may go wrong in one world, as chances; what the transport can do; the bounds of waits."""

    capabilities: Capabilities
    limits: Limits
    integrity: bool
    latency_s: float = 0.005
    op_s: float = 0.05
    op_fails: float = 0.0
    op_hangs: float = 0.0
    op_hangs_forever: float = 0.0
    corrupts: float = 0.0
    duplicates: float = 0.0


def capabilities_of(rng: random.Random) -> Capabilities:
    """A transport of some kind."""
    return Capabilities(
        ops=frozenset(Op),
        access=rng.choice((Access.GRANT, Access.REGION)),
        fence=rng.choice((FenceScope.NONE, FenceScope.PEER)),
        cancel=rng.random() < 0.5,
        max_descriptors=rng.choice((1 << 20, 1 << 20, 4)),
    )


def stretched(limits: Limits, rng: random.Random) -> Limits:
    """The same proportions with some play, within what the configuration accepts."""
    lease = limits.lease_s * rng.uniform(0.8, 1.6)
    return evolve(
        limits,
        lease_s=lease,
        patience_s=limits.patience_s * rng.uniform(0.6, 1.5),
        op_timeout_s=limits.op_timeout_s * rng.uniform(0.6, 1.5),
        transfer_max_s=limits.transfer_max_s * rng.uniform(0.7, 1.3),
    )
