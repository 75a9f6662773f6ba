"""The memory of finished transfers: what late messages and late engine calls are answered from (R9)."""

from __future__ import annotations

from attrs import define, evolve, field, frozen

from kvx.core.model import Peer, Reason, Side


@frozen
class Tombstone:
    """How a transfer ended here. `side` is None for an abort that came before anything else.

    `accepted` holds the (peer, epoch) whose Done was answered Ack(true). `reported`: the engine
    has had its Outcome. `owed`: the engine has still to give its last Stage, which is answered
    by Released; an owed tombstone is remembered for `owed_s` longer.
    """

    transfer: str
    side: Side | None
    reason: Reason | None
    detail: str
    accepted: frozenset[tuple[Peer, int]]
    reported: bool
    owed: bool


@define
class Tombstones:
    """Bounded memory: when `limit` is reached, `full` makes the endpoint refuse new grants. Refusals have to be
    remembered as well: at twice the limit there is no room for these either (`spent`).

    Nothing younger than `keep_s` is ever dropped, so an abort outlives the longest message delay.
    """

    limit: int
    keep_s: float
    owed_s: float
    _stones: dict[str, tuple[Tombstone, float]] = field(factory=dict)
    _next_sweep: float = 0.0

    def __len__(self) -> int:
        return len(self._stones)

    def full(self, now: float) -> bool:
        self.sweep(now)
        return len(self._stones) >= self.limit

    def spent(self, now: float) -> bool:
        self.sweep(now)
        return len(self._stones) >= 2 * self.limit

    def bury(self, stone: Tombstone, now: float) -> None:
        self._stones[stone.transfer] = (stone, now)
        self.sweep(now)

    def get(self, transfer: str) -> Tombstone | None:
        found = self._stones.get(transfer)
        return found[0] if found else None

    def settle(self, transfer: str, *, reported: bool, owed: bool) -> None:
        stone, since = self._stones[transfer]
        self._stones[transfer] = (evolve(stone, reported=reported, owed=owed), since)

    def sweep(self, now: float) -> None:
        """Forget what is old enough; costs one pass per quarter of `keep_s`, whatever the traffic."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + self.keep_s / 4
        for transfer, (stone, since) in list(self._stones.items()):
            if now >= since + self.keep_s + (self.owed_s if stone.owed else 0.0):
                del self._stones[transfer]
