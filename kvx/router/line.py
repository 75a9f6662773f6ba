"""Requests that wait for room at an instance: first come, first served, a bounded number, a bounded time."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from attrs import define, field

from kvx.router.policy import Busy
from kvx.router.upstream import Failure

T = TypeVar("T")


class Overloaded(Failure):
    """There is no room, or none came in time."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(503, "overloaded", message)
        self.retry_after = max(1, math.ceil(retry_after))


@define(eq=False)
class _Turn:
    since: float
    event: asyncio.Event = field(factory=asyncio.Event)


@define(eq=False)
class Line:
    """At most `limit` requests wait, each at most `wait_s` seconds. `wake` says that there may be room now."""

    limit: int
    wait_s: float
    _turns: deque[_Turn] = field(factory=deque)

    def __len__(self) -> int:
        return len(self._turns)

    def oldest_s(self) -> float:
        """How long the first one waits already; 0 where nobody does."""
        return time.monotonic() - self._turns[0].since if self._turns else 0.0

    async def through(self, take: Callable[[], T]) -> T:
        """What `take` gives as soon as it no longer raises Busy. Raises Overloaded, and what else `take` raises."""
        busy: Busy | None = None
        if not self._turns:
            try:
                return take()
            except Busy as error:
                busy = error
        if len(self._turns) >= self.limit:
            told = f"{busy}; " if busy else ""
            raise Overloaded(f"{told}{len(self._turns)} requests wait already", self.oldest_s())
        turn = _Turn(time.monotonic())
        self._turns.append(turn)
        try:
            async with asyncio.timeout(self.wait_s):
                while True:
                    await turn.event.wait()
                    turn.event.clear()
                    try:
                        return take()
                    except Busy as error:
                        busy = error
        except TimeoutError as error:
            raise Overloaded(f"no room in {self.wait_s:g} s: {busy or 'others were before it'}", self.wait_s) from error
        finally:
            self._turns.remove(turn)
            self.wake()

    def wake(self) -> None:
        if self._turns:
            self._turns[0].event.set()
