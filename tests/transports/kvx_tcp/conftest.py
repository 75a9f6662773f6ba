"""Ranks with real sockets in one process, each polled only when a test says so."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvx.core.events import Fenced, Forbidden, OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Layout, Op, Peer, Region, Stamp
from kvx.transport import Completion
from kvx_tcp.transport import TcpTransport

LIMIT_S = 30.0
CANARY = 4096


class Rank:
    """A transport with one region, canaries on both sides of it, and what `poll` has told."""

    def __init__(self, name: str, nbytes: int, epoch: int, **options: Any) -> None:
        self.peer = Peer(name, 0)
        self.epoch = epoch
        self._whole = np.full(nbytes + 2 * CANARY, 0xA5, dtype=np.uint8)
        self.memory = self._whole[CANARY : CANARY + nbytes]
        self.memory[:] = 0
        self.transport = TcpTransport({"peer": str(self.peer), **options})
        self.transport.register([Region(0, self.memory.ctypes.data, nbytes)])
        self.told: list[Completion] = []

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(self.peer.instance, 0, self.epoch, "127.0.0.1:1", Layout("m", "d", "v", (), 0))

    def know(self, other: Rank, metadata: bytes | None = None) -> None:
        self.transport.connect(other.info, metadata or other.transport.metadata())

    def post(self, op_id: int, to: Rank, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self.transport.post(op_id, to.peer, op, local, remote, stamp)

    def poll(self) -> list[Completion]:
        new = self.transport.poll()
        self.told += new
        return new

    def poll_dry(self) -> None:
        """Poll alone until there is nothing to do."""
        end = time.monotonic() + LIMIT_S
        while select.select([self.transport], [], [], 0)[0]:
            self.poll()
            assert time.monotonic() < end, "poll never comes to rest"

    def poll_until_stalled(self) -> None:
        """Poll alone until nothing has called for it for a while: kernels fill the last buffers slowly."""
        end = time.monotonic() + LIMIT_S
        while select.select([self.transport], [], [], 0.3)[0]:
            self.poll()
            assert time.monotonic() < end, "a stalled transport asks to be polled again and again"

    @property
    def ended(self) -> dict[int, OpDone | OpFailed]:
        ended = [one for one in self.told if isinstance(one, OpDone | OpFailed)]
        assert len({one.op_id for one in ended}) == len(ended), "an operation has ended twice"
        return {one.op_id: one for one in ended}

    def done(self, op_id: int) -> bool:
        return isinstance(self.ended.get(op_id), OpDone)

    def failed(self, op_id: int) -> OpFailed:
        one = self.ended[op_id]
        assert isinstance(one, OpFailed), one
        return one

    @property
    def answers(self) -> list[Forbidden | Fenced]:
        return [one for one in self.told if isinstance(one, Forbidden | Fenced)]

    @property
    def canaries(self) -> bool:
        edges = np.concatenate((self._whole[:CANARY], self._whole[-CANARY:]))
        return bool((edges == 0xA5).all())


def _pump(*ranks: Rank, until: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < end, f"not in time; told: {[rank.told for rank in ranks]}"
        select.select([rank.transport for rank in ranks], [], [], 0.1)
        for rank in ranks:
            rank.poll()


@pytest.fixture
def pump() -> Callable[..., None]:
    """Poll these ranks until a condition holds; bounded."""
    return _pump


@pytest.fixture
def make() -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(name: str, nbytes: int = 1 << 20, epoch: int = 1, **options: Any) -> Rank:
        ranks.append(Rank(name, nbytes, epoch, **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.transport.close()
        assert rank.canaries, f"bytes around the memory of {rank.peer} were touched"


@pytest.fixture
def pair(make: Callable[..., Rank]) -> Callable[..., tuple[Rank, Rank]]:
    """An initiator and a target of one size that know each other, connected if `warm`."""

    def pair(nbytes: int = 1 << 20, warm: bool = False, **options: Any) -> tuple[Rank, Rank]:
        initiator, target = make("a", nbytes, **options), make("b", nbytes, **options)
        initiator.know(target)
        target.know(initiator)
        if warm:
            nothing = Descriptors.of([])
            target.transport.permit("warm", None, Op.READ, nothing, Stamp("warm", 1, 1))
            initiator.post(999, target, Op.READ, nothing, nothing, Stamp("warm", 1, 1))
            _pump(initiator, target, until=lambda: initiator.done(999))
            initiator.told.clear()
        return initiator, target

    return pair


@pytest.fixture
def pattern() -> Callable[[int, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    """Bytes that tell every position, different for every seed."""

    def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    return pattern
