"""The engine port: the whole vocabulary between an engine adapter and kvx.

An adapter gives its regions and layout once, blocks by `Expose` and `Stage`, and takes the
news. Its engine's thread never waits: `put` and `news` only touch two queues (R12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvx.core.events import Abort, Claim, Drain, EngineEvent, Expose, Stage
from kvx.core.model import InstanceInfo, News, Offered, Outcome, Released


class EngineInstance(Protocol):
    """What an adapter sees of kvx on one rank."""

    @property
    def info(self) -> InstanceInfo: ...

    def put(self, events: Sequence[EngineEvent]) -> None:
        """Hand over one batch of events; never blocks. One call per engine step or layer."""
        ...

    def news(self) -> list[News]:
        """Everything that happened since the last call, in order; never blocks."""
        ...

    def snapshot(self) -> dict[str, object]:
        """Counters and open transfers, for status pages and tests."""
        ...

    def close(self) -> None:
        """Stop the runtime thread and close every socket; bounded; may be called twice."""
        ...


__all__ = [
    "Abort",
    "Claim",
    "Drain",
    "EngineEvent",
    "EngineInstance",
    "Expose",
    "News",
    "Offered",
    "Outcome",
    "Released",
    "Stage",
]
