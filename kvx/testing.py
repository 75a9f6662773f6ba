"""Doubles for the tests of adapters: no second process, no sockets, no time."""

from __future__ import annotations

from collections.abc import Sequence

from kvx.core.events import EngineEvent
from kvx.core.model import InstanceInfo, Layout, News


class FakeInstance:
    """An EngineInstance that records what it is given and replays what it is told to."""

    def __init__(self, layout: Layout, *, instance: str = "fake", epoch: int = 1) -> None:
        self.info = InstanceInfo(instance, layout.rank, epoch, "127.0.0.1:5700", layout)
        self.batches: list[tuple[EngineEvent, ...]] = []
        """One entry per `put`."""
        self.closed = False
        self._news: list[News] = []

    @property
    def events(self) -> list[EngineEvent]:
        """Everything that was put, in order."""
        return [event for batch in self.batches for event in batch]

    def tell(self, *news: News) -> None:
        """Let these be the next news."""
        self._news += news

    def put(self, events: Sequence[EngineEvent]) -> None:
        self.batches.append(tuple(events))

    def news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def snapshot(self) -> dict[str, object]:
        return {"batches": len(self.batches)}

    def close(self) -> None:
        self.closed = True
