"""Bytes: every shape in its place, WRITE and READ, and the word done only when they stand there."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Reason

pytestmark = pytest.mark.timeout(90)


def scattered(pieces: int, size: int, seed: int) -> Descriptors:
    """Pieces of one region of which no two touch, shuffled."""
    order = np.random.default_rng(seed).permutation(pieces).astype(np.int64) * (size + 64)
    return Descriptors(np.zeros_like(order), order, np.full_like(order, size))


def gathered(memory: np.ndarray[Any, np.dtype[np.uint8]], pieces: Descriptors) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate([memory[offset : offset + length] for _, offset, length in pieces.pieces()])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("pieces", "size"), [(1, 1), (1, 9_000_001), (3, 70_000), (5000, 200)])
def test_bytes_come_into_their_places(pair: Any, pump: Any, op: Op, pieces: int, size: int) -> None:
    initiator, target = pair(pieces * (size + 64))
    source, sink = (initiator, target) if op is Op.WRITE else (target, initiator)
    source.memory[:] = np.random.default_rng(pieces).integers(1, 256, len(source.memory), dtype=np.uint8)
    local, remote = scattered(pieces, size, 1), scattered(pieces, size, 2)
    initiator.post(7, target, op, local, remote)
    pump(initiator, target, until=lambda: initiator.done(7))
    assert initiator.ended[7] == OpDone(7, pieces * size)
    here, there = gathered(initiator.memory, local), gathered(target.memory, remote)
    assert np.array_equal(here, there)
    assert np.count_nonzero(sink.memory) == pieces * size, "bytes between the pieces were touched"


def test_pieces_of_different_lengths_and_of_none(pair: Any, pump: Any) -> None:
    initiator, target = pair()
    initiator.memory[:] = np.random.default_rng(3).integers(1, 256, 1 << 20, dtype=np.uint8)
    local = Descriptors.of([(0, 10, 5), (0, 100, 0), (0, 1000, 70_001), (0, 0, 3)])
    remote = Descriptors.of([(0, 500, 5), (0, 0, 0), (0, 300_000, 70_001), (0, 900_000, 3)])
    initiator.post(1, target, Op.WRITE, local, remote)
    initiator.post(2, target, Op.READ, Descriptors.of([]), Descriptors.of([]))
    pump(initiator, target, until=lambda: initiator.done(1) and initiator.done(2))
    assert np.array_equal(gathered(initiator.memory, local), gathered(target.memory, remote))
    assert initiator.ended[2] == OpDone(2, 0)


def test_a_write_is_done_only_when_its_target_has_said_so(pair: Any, pump: Any) -> None:
    """NIXL's own DONE would come without the target's runtime: this one must not."""
    initiator, target = pair()
    initiator.memory[:] = 7
    whole = Descriptors.of([(0, 0, 1 << 20)])
    initiator.post(1, target, Op.WRITE, whole, whole)
    pump(initiator, target, until=lambda: initiator.done(1))
    initiator.memory[:] = 8
    initiator.post(2, target, Op.WRITE, whole, whole)
    for _ in range(10):
        select.select([initiator.transport], [], [], 0.1)
        initiator.poll()
        assert 2 not in initiator.ended
    pump(initiator, target, until=lambda: initiator.done(2))
    assert (target.memory == 8).all()


def test_both_sides_write_at_once(pair: Any, pump: Any) -> None:
    """Each of them is initiator and target; LIBFABRIC's agents wait for one another while they meet."""
    a, b = pair()
    a.memory[: 1 << 19], b.memory[: 1 << 19] = 1, 2
    first, second = Descriptors.of([(0, 0, 1 << 19)]), Descriptors.of([(0, 1 << 19, 1 << 19)])
    a.post(1, b, Op.WRITE, first, second)
    b.post(1, a, Op.WRITE, first, second)
    pump(a, b, until=lambda: a.done(1) and b.done(1))
    assert (a.memory[1 << 19 :] == 2).all() and (b.memory[1 << 19 :] == 1).all()


def test_what_is_cancelled_is_not_posted_any_more(pair: Any, pump: Any) -> None:
    initiator, target = pair(64 << 20)
    initiator.memory[:] = 9
    whole = Descriptors.of([(0, 0, 64 << 20)])
    initiator.post(1, target, Op.WRITE, Descriptors.of([(0, 0, 1)]), Descriptors.of([(0, 0, 1)]))
    pump(initiator, target, until=lambda: initiator.done(1))
    initiator.post(2, target, Op.WRITE, whole, whole)
    initiator.transport.cancel(2)
    initiator.post(3, target, Op.WRITE, Descriptors.of([(0, 0, 1)]), Descriptors.of([(0, 0, 1)]))
    pump(initiator, target, until=lambda: 2 in initiator.ended and initiator.done(3))
    assert initiator.failed(2).reason is Reason.ABORTED
    assert (target.memory == 0).any()
    moved = np.count_nonzero(target.memory)
    target.memory[:] = 3
    initiator.post(4, target, Op.READ, Descriptors.of([(0, 0, 1)]), Descriptors.of([(0, 0, 1)]))
    pump(initiator, target, until=lambda: initiator.done(4))
    assert (target.memory == 3).all(), f"bytes landed after OpFailed ({moved} before)"


@pytest.mark.parametrize(
    ("local", "remote", "reason"),
    [
        ([(0, 0, 10)], [(0, 1 << 20, 10)], Reason.BOUNDS),
        ([(0, (1 << 20) - 5, 10)], [(0, 0, 10)], Reason.BOUNDS),
        ([(1, 0, 10)], [(0, 0, 10)], Reason.BOUNDS),
        ([(0, 0, 10)], [(5, 0, 10)], Reason.BOUNDS),
        ([(0, 0, 10)], [(0, -8, 10)], Reason.BOUNDS),
        ([(0, 0, 10)], [(0, 0, 11)], Reason.BOUNDS),
        ([(0, 0, 10)], [(0, 0, 10), (0, 20, 10)], Reason.BOUNDS),
    ],
)
def test_what_lies_outside_is_refused_before_nixl_sees_it(
    pair: Any, pump: Callable[..., None], local: list[Any], remote: list[Any], reason: Reason
) -> None:
    initiator, target = pair()
    initiator.memory[:] = 5
    initiator.post(1, target, Op.WRITE, Descriptors.of(local), Descriptors.of(remote))
    pump(initiator, target, until=lambda: 1 in initiator.ended)
    assert initiator.failed(1).reason is reason
    assert not target.memory.any()
