"""Transports that are broken on purpose in what they declare: each does what it says it cannot do.

An engine plans by the declaration: who frees memory on an answer that was never promised, or lets a peer use
an operation that nobody guards, is as wrong as who does too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from kvx.core.events import Fenced, Forbidden, OpFailed
from kvx.core.model import Op, Peer
from kvx.transport import Capabilities, Completion
from kvx_conformance.faults import Wrapper
from kvx_conformance.suite.broken import Broken
from kvx_conformance.suite.correct_transports import Modest
from kvx_conformance.suite.subject import Subject

_PAUSE_S = 0.005


class _Declares(Wrapper):
    """Declares one operation and performs both."""

    only: Op

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, ops=frozenset({self.only}))


class ReadsUndeclared(_Declares):
    only = Op.WRITE


class WritesUndeclared(_Declares):
    only = Op.READ


class _Answers(Modest):
    """Answers what it cannot do as if it were done."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._told: list[Completion] = []

    @property
    def idle_poll_s(self) -> float | None:
        return _PAUSE_S

    def poll(self) -> list[Completion]:
        told, self._told = self._told, []
        return told + self.inner.poll()


class CancelsUndeclared(_Answers):
    """`cancel` is told as the operation's end, and the bytes move on."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._ended: set[int] = set()

    def cancel(self, op_id: int) -> None:
        self._ended.add(op_id)
        self._told.append(OpFailed(op_id, detail="cancelled"))

    def poll(self) -> list[Completion]:
        told, self._told = self._told, []
        return told + [one for one in self.inner.poll() if getattr(one, "op_id", None) not in self._ended]


class ForbidsUndeclared(_Answers):
    def forbid(self, transfer: str) -> None:
        self._told.append(Forbidden(transfer))


class FencesUndeclared(_Answers):
    def fence(self, peer: Peer, generation: int) -> None:
        self._told.append(Fenced(peer, generation))


def _broken(kind: type[Wrapper], cause: str, *proves: str) -> Broken:
    return Broken(Subject(f"{__name__}:{kind.__name__}"), cause, proves[:1], proves)


BROKEN_DECLARATIONS: Mapping[str, Broken] = {
    "reads-undeclared": _broken(
        ReadsUndeclared, "It declares WRITE alone, and performs READ.", "KVX-TRN-010.undeclared-read"
    ),
    "writes-undeclared": _broken(
        WritesUndeclared, "It declares READ alone, and performs WRITE.", "KVX-TRN-010.undeclared-write"
    ),
    "forbids-undeclared": _broken(
        ForbidsUndeclared,
        "Its access is by region, and it tells Forbidden.",
        "KVX-TRN-016.goes-on-read",
        "KVX-TRN-016.goes-on-write",
    ),
    "cancels-undeclared": _broken(
        CancelsUndeclared,
        "It does not declare `cancel`, and tells it as the operation's end.",
        "KVX-TRN-022.goes-on-read",
        "KVX-TRN-022.goes-on-write",
    ),
    "fences-undeclared": _broken(
        FencesUndeclared,
        "It declares no fence, and tells Fenced.",
        "KVX-TRN-024.goes-on-read",
        "KVX-TRN-024.goes-on-write",
    ),
}
