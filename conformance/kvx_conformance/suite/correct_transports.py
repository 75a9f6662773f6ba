"""Correct transports that can do less than tcp, or in another way: no case may find fault with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from kvx.core.events import OpFailed
from kvx.core.model import Descriptors, Op, Peer, Stamp
from kvx.transport import Access, Capabilities, Completion, FenceScope
from kvx_conformance.faults import Wrapper
from kvx_conformance.suite.subject import Subject

_PAUSE_S = 0.002


class Modest(Wrapper):
    """Declares neither forbid, fence nor cancel, and has none."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, access=Access.REGION, fence=FenceScope.NONE, cancel=False)

    def forbid(self, transfer: str) -> None:
        """Nothing: whoever holds the address writes on."""

    def fence(self, peer: Peer, generation: int) -> None:
        """Nothing, and no Fenced follows."""

    def cancel(self, op_id: int) -> None:
        """Nothing: an operation ends when it ends."""


class Fencing(Wrapper):
    """Cuts off a peer, and can take back no single transfer, as a device that closes a queue pair."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, access=Access.REGION)

    def forbid(self, transfer: str) -> None:
        """Nothing: whoever holds the address writes on, until it is fenced."""


class _OneWay(Wrapper):
    """Has one of the two operations."""

    only: Op

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, ops=frozenset({self.only}))

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._refused: list[Completion] = []

    @property
    def idle_poll_s(self) -> float | None:
        return _PAUSE_S

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        if op is self.only:
            self.inner.post(op_id, peer, op, local, remote, stamp)
        else:
            self._refused.append(OpFailed(op_id, detail=f"{op.name} is not possible here"))

    def poll(self) -> list[Completion]:
        refused, self._refused = self._refused, []
        return refused + self.inner.poll()


class WritesOnly(_OneWay):
    only = Op.WRITE


class ReadsOnly(_OneWay):
    only = Op.READ


class Timed(Wrapper):
    """Has no descriptor, and is polled by the clock."""

    @property
    def idle_poll_s(self) -> float | None:
        return 0.001

    def fileno(self) -> int | None:
        return None


def _subject(kind: type[Wrapper]) -> Subject:
    return Subject(f"{__name__}:{kind.__name__}")


CORRECT_TRANSPORTS: Mapping[str, Subject] = {
    "tcp": Subject("tcp"),
    "modest": _subject(Modest),
    "fencing": _subject(Fencing),
    "writes-only": _subject(WritesOnly),
    "reads-only": _subject(ReadsOnly),
    "timed": _subject(Timed),
}
