"""The control of token tests: what a transport that drops bytes moves all the same."""

from __future__ import annotations

from typing import Any

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Peer, Stamp
from kvx_conformance.faults import DropsBytes

SECTION = {"listen_host": "127.0.0.1", "advertise_host": "127.0.0.1", "secret": b"", "insecure": False, "peer": "a#0"}
PEER, STAMP = Peer("b", 0), Stamp("t", 1, 1)
LOCAL = Descriptors.of([(0, 0, 10), (5, 0, 20), (6, 64, 30)])
REMOTE = Descriptors.of([(0, 90, 10), (5, 70, 20), (6, 40, 30)])


class Inner:
    def __init__(self) -> None:
        self.posted: list[tuple[int, Any, Any]] = []

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.posted.append((op_id, local.pieces(), remote.pieces()))

    def poll(self) -> list[Any]:
        return []


def posted(**options: int) -> tuple[Inner, list[Any]]:
    transport = DropsBytes({**SECTION, **options})
    transport.inner.close()
    transport.inner = inner = Inner()  # type: ignore[assignment]
    transport.post(7, PEER, Op.WRITE, LOCAL, REMOTE, STAMP)
    return inner, transport.poll()


def test_everything_is_dropped() -> None:
    inner, done = posted()
    assert inner.posted == []
    assert done == [OpDone(7, 60)]


def test_regions_behind_the_cache_are_moved() -> None:
    inner, done = posted(regions=6)
    assert inner.posted == [(7, [(6, 64, 30)], [(6, 40, 30)])]
    assert done == []


def test_an_operation_of_cache_only_is_done_at_once() -> None:
    inner, done = posted(regions=7)
    assert inner.posted == []
    assert done == [OpDone(7, 60)]
