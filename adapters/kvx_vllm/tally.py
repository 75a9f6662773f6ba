"""What vLLM's metrics are told of transfers: plain data, which vLLM carries to the process that serves /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from kvx.core.model import Mode, Reason, Role
from kvx_vllm.metadata import Ended


@frozen
class Levels:
    """Transfers that are open; blocks that transfers hold, and those of them that failed transfers still hold."""

    open: int = 0
    held: int = 0
    quarantined: int = 0


class Tally:
    """Counts in vLLM's scheduler, between two of its steps."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, str, str, int, float]] = []
        self._refused: list[str] = []
        self._levels = Levels()

    def ended(self, mode: Mode, role: Role, end: Ended) -> None:
        outcome = "ok" if end.ok else (end.reason or Reason.OTHER).value
        self._ended.append((mode.value, role.value, outcome, end.bytes, end.seconds))

    def refused(self, reason: Reason) -> None:
        """A request that was not even begun."""
        self._refused.append(reason.value)

    def take(self, levels: Levels) -> dict[str, Any] | None:
        """Everything since the last call; None where nothing has changed."""
        if not self._ended and not self._refused and levels == self._levels:
            return None
        data = {
            "ended": self._ended,
            "refused": self._refused,
            "open": levels.open,
            "held": levels.held,
            "quarantined": levels.quarantined,
        }
        self._ended, self._refused, self._levels = [], [], levels
        return data


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two takes of one instance in a row."""
    return {
        **later,
        "ended": [*earlier["ended"], *later["ended"]],
        "refused": [*earlier["refused"], *later["refused"]],
    }


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """One line of vLLM's log."""
    good = [end for end in data["ended"] if end[2] == "ok"]
    seconds = sum(end[4] for end in good)
    return {
        "transfers ok": len(good),
        "failed": len(data["ended"]) - len(good),
        "refused": len(data["refused"]),
        "MB": round(sum(end[3] for end in good) / 1e6, 3),
        "mean s": round(seconds / len(good), 4) if good else 0,
        "open": data["open"],
        "held blocks": data["held"],
        "of these quarantined": data["quarantined"],
    }
