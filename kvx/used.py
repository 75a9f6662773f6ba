"""Which transfer ids this instance has seen: an id that comes again must never meet the old transfer's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class UsedIds:
    """Ids of transfers that are over, each remembered for `keep_s` seconds of `clock`."""

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._ids: set[str] = set()
        self._until: deque[tuple[float, str]] = deque()

    def add(self, transfer: str) -> None:
        now = self._clock()
        while self._until and self._until[0][0] <= now:
            self._ids.discard(self._until.popleft()[1])
        self._ids.add(transfer)
        self._until.append((now + self._keep_s, transfer))

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._ids

    def __len__(self) -> int:
        return len(self._ids)
