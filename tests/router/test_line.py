from __future__ import annotations

import asyncio

import pytest

from kvx.router.line import Line, Overloaded
from kvx.router.policy import Busy


class Room:
    """So many may be in at once."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.order: list[str] = []

    def take(self, name: str) -> str:
        if not self.places:
            raise Busy("everything is taken")
        self.places -= 1
        self.order.append(name)
        return name


def test_first_come_first_served_and_one_wake_lets_all_in_for_whom_there_is_room() -> None:
    async def scenario() -> None:
        room, line = Room(0), Line(8, 20.0)
        waiting = []
        for count, name in enumerate("abc"):
            waiting.append(asyncio.create_task(line.through(lambda name=name: room.take(name))))  # type: ignore[misc]
            while len(line) <= count:
                await asyncio.sleep(0)
        room.places = 2
        line.wake()
        assert await waiting[0] == "a"
        assert await waiting[1] == "b"
        assert (room.order, len(line)) == (["a", "b"], 1)
        # who comes now does not overtake the one that waits
        late = asyncio.create_task(line.through(lambda: room.take("d")))
        while len(line) < 2:
            await asyncio.sleep(0)
        room.places = 2
        line.wake()
        await asyncio.gather(*waiting, late)
        assert room.order == ["a", "b", "c", "d"]
        assert line.oldest_s() == 0

    asyncio.run(scenario())


def test_a_line_is_bounded_and_so_is_a_wait() -> None:
    async def scenario() -> None:
        room, line = Room(0), Line(1, 0.05)
        first = asyncio.create_task(line.through(lambda: room.take("a")))
        while not len(line):
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests wait already") as full:
            await line.through(lambda: room.take("b"))
        assert full.value.status == 503
        assert full.value.retry_after >= 1
        with pytest.raises(Overloaded, match=r"no room in 0\.05 s: everything is taken"):
            await first
        assert len(line) == 0

    asyncio.run(scenario())


def test_who_leaves_a_line_lets_the_next_one_be_first() -> None:
    async def scenario() -> None:
        room, line = Room(0), Line(8, 20.0)
        tasks = [asyncio.create_task(line.through(lambda name=name: room.take(name))) for name in "ab"]  # type: ignore[misc]
        while len(line) < 2:
            await asyncio.sleep(0)
        tasks[0].cancel()
        room.places = 1
        assert await tasks[1] == "b"
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    asyncio.run(scenario())
