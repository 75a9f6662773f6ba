"""What NIXL itself promises, measured without kvx's protocol: why `fence` is none, whose word ends a WRITE."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvx.core.model import Region
from kvx_nixl.agent import Agent, NixlError
from kvx_nixl.backends import LIBFABRIC, UCX
from kvx_nixl.moves import note
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions

pytestmark = pytest.mark.timeout(120)
BIG = 256 << 20
SMALL = 64 << 10
LIMIT_S = 40.0
SILENT_S = 1.0


class Owner:
    """An agent and the thread that it belongs to."""

    def __init__(self, name: str, transport: str, section: dict[str, Any], nbytes: int, fill: int) -> None:
        self.name = name
        self.memory = np.full(nbytes, fill, dtype=np.uint8)
        self.regions = Regions.of([Region(0, self.memory.ctypes.data, nbytes)])
        backend = {"nixl-ucx": UCX, "nixl-libfabric": LIBFABRIC}[transport]
        options = Options.of(section)
        backend.prepare(options)
        self._thread = ThreadPoolExecutor(1)
        self.agent: Agent = self.do(lambda: Agent(name, backend, options, self.regions))

    def do(self, call: Callable[[], Any]) -> Any:
        return self._thread.submit(call).result(LIMIT_S)

    def meet(self, other: Owner) -> None:
        """LIBFABRIC adds a peer once that peer adds too."""
        mine, theirs = (owner.do(owner.agent.metadata) for owner in (self, other))
        first = self._thread.submit(self.agent.add, other.name, theirs)
        second = other._thread.submit(other.agent.add, self.name, mine)
        first.result(LIMIT_S)
        second.result(LIMIT_S)

    def poll(self) -> list[bytes]:
        return [data for notes in self.do(self.agent.notifications).values() for data in notes]

    def write(self, other: Owner) -> Any:
        """The whole memory, in one piece. Returns the post, or None: NIXL said at once that it is done."""

        def begin() -> Any:
            here, there = (np.array([[o.memory.ctypes.data, o.memory.nbytes, 0]], np.uint64) for o in (self, other))
            lists = self.agent.prepare(other.name, here, "DRAM", there, "DRAM")
            post = self.agent.make("WRITE", lists, np.zeros(1, np.int32), note(1, 0))
            return None if self.agent.start(post) else post

        return self.do(begin)

    def end(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def owners(name: str, sections: dict[str, dict[str, Any]]) -> Iterator[Callable[[int], tuple[Owner, Owner]]]:
    made: list[Owner] = []

    def owners(nbytes: int) -> tuple[Owner, Owner]:
        writer, target = (
            Owner(f"{n}-{nbytes}", name, sections[name], nbytes, n == "writer") for n in ("writer", "target")
        )
        made.extend((writer, target))
        writer.meet(target)
        return writer, target

    yield owners
    for owner in made:
        owner.end()


@pytest.mark.slow
def test_deregistering_and_removing_do_not_stop_a_write(owners: Any, name: str, keep: Any) -> None:
    """Should this ever fail, `capabilities.fence` may promise more than none."""
    writer, target = owners(BIG)
    post, end = writer.write(target), time.monotonic() + LIMIT_S
    while not target.memory[BIG // 4]:
        assert post is not None and time.monotonic() < end
        target.poll()
        writer.do(lambda: writer.agent.check(post))

    def withdraw() -> float:
        started = time.perf_counter()
        target.agent.deregister()
        target.agent.remove(writer.name)
        return time.perf_counter() - started

    took = target.do(withdraw)
    before = np.count_nonzero(target.memory)
    said, end = "", time.monotonic() + LIMIT_S
    while not said and time.monotonic() < end:
        try:
            said = "DONE" if writer.do(lambda: writer.agent.check(post)) else ""
            target.poll()
        except NixlError as error:
            said = str(error)
    after = np.count_nonzero(target.memory)
    keep(
        "nixl-promises",
        f"{name}: the target deregisters and removes the writer midway",
        bytes=BIG,
        calls_ms=took * 1e3,
        landed_when_they_returned=int(before),
        landed_in_the_end=int(after),
        the_writer_is_told=said,
    )
    assert took < 1.0
    assert after > before, "nothing landed afterwards"


def test_what_nixls_own_done_says_of_a_write(owners: Any, name: str, keep: Any) -> None:
    """The target makes no progress: what its notification says, nobody else can know."""
    writer, target = owners(SMALL)
    post, started = writer.write(target), time.monotonic()
    done = post is None
    while not done and time.monotonic() < started + SILENT_S:
        done = writer.do(lambda: writer.agent.check(post))
    landed = int(np.count_nonzero(target.memory))
    notes: list[bytes] = []
    while not notes:
        assert time.monotonic() < started + LIMIT_S
        notes = target.poll()
        if not done:
            writer.do(lambda: writer.agent.check(post))
    assert notes == [note(1, 0)]
    assert (target.memory == 1).all(), "the notification has come before the bytes"
    keep(
        "nixl-promises",
        f"{name}: NIXL's DONE of a WRITE to a target that makes no progress",
        bytes=SMALL,
        done_within_a_second=done,
        landed_by_then=landed,
    )
