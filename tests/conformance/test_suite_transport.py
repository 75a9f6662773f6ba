"""The rig of the transport cases notices what it is there for: bytes, canaries, late bytes, exceptions, second ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core.events import OpDone
from kvx.core.model import Descriptors, Op, Peer
from kvx_conformance.suite import peer_process
from kvx_conformance.suite.all import CASES
from kvx_conformance.suite.broken_transports import BROKEN_TRANSPORTS, CORRECT_TRANSPORTS
from kvx_conformance.suite.case import Context, Finding
from kvx_conformance.suite.ground import CANARY, Ground, pattern
from kvx_conformance.suite.ops import piece
from kvx_conformance.suite.ranks import STAMP, Rig
from kvx_conformance.suite.subject import Subject

SIZE = 64 << 10


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Callable[[Subject], Context]]:
    made: list[Context] = []

    def make(subject: Subject) -> Context:
        transport = subject.make_transport("x#0")
        declared = transport.capabilities
        transport.close()
        made.append(Context(subject, declared, tmp_path, random.Random(1)))  # noqa: S311 - data of a test
        return made[-1]

    yield make
    for one in made:
        one.close()


def filled(*sizes: int, seed: int = 1) -> Ground:
    ground = Ground(sizes)
    ground.fill(seed)
    assert not ground.flaw()
    return ground


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (CANARY, "one byte is wrong, region 0 offset 0 "),
        (CANARY + 99, "one byte is wrong, region 0 offset 99 "),
        (CANARY - 1, "outside of the regions, 1 before region 0 "),
        (CANARY + 100, "outside of the regions, 1 beyond the end of region 0 "),
        (2 * CANARY + 100, "region 1 offset 0 "),
        (2 * CANARY + 149, "region 1 offset 49 "),
        (2 * CANARY + 150, "outside of the regions, 1 beyond the end of region 1 "),
        (0, "outside of the regions, 4096 before region 0 "),
    ],
)
def test_one_wrong_byte_is_noticed_wherever_it_is(place: int, told: str) -> None:
    ground = filled(100, 50)
    ground.memory[place] ^= 1
    assert told in ground.flaw()


def test_every_byte_of_a_pattern_tells_its_place_and_its_seed() -> None:
    one, other = pattern(1 << 20, 1), pattern(1 << 20, 2)
    assert np.array_equal(one, pattern(1 << 20, 1))
    for wrong in (other, np.roll(one, 1), np.roll(one, 8), np.roll(one, 4096)):
        assert (one == wrong).mean() < 0.01


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_bytes_land_as_they_would_piece_by_piece(data: st.DataObject) -> None:
    sizes = (300, 700)
    ground, source = filled(*sizes), filled(*sizes, seed=2)
    count = data.draw(st.sampled_from((1, 5, 300)))
    chance = random.Random(data.draw(st.integers(0, 1000)))  # noqa: S311 - data of a test
    to, of = [], []
    for at in range(count):
        length = chance.randint(0, 1)
        to.append((1, 2 * at, length))
        of.append((chance.randint(0, 1), chance.randint(0, 299), length))
    payload = source.take(Descriptors.of(of))
    landed = ground.with_bytes(Descriptors.of(to), payload)
    due = ground.due.copy()
    starts = {0: CANARY, 1: 2 * CANARY + 300}
    for (here, there, length), (region, offset, _) in zip(to, of, strict=True):
        where = starts[here] + there
        due[where : where + length] = source.due[starts[region] + offset : starts[region] + offset + length]
    assert np.array_equal(landed, due)


def test_an_old_or_a_new_byte_is_none_that_is_wrong() -> None:
    ground = filled(1000)
    also = ground.with_bytes(piece(10, 500), pattern(500, 9))
    ground.memory[CANARY + 100 : CANARY + 200] = also[CANARY + 100 : CANARY + 200]
    assert ground.flaw()
    assert not ground.flaw(also)
    ground.memory[CANARY + 600] ^= 1
    assert "region 0 offset 600" in ground.flaw(also)


def test_a_good_operation_is_compared_on_both_sides(context: Callable[[Subject], Context]) -> None:
    made = context(Subject("tcp"))
    rig = Rig.of(made)
    a, b = rig.pair(SIZE)
    for op in Op:
        rig.finish(rig.post(a, b, op, piece(1, 1000), piece(2, 1000)))
    assert made.checks == 6
    b.ground.memory[CANARY] ^= 1
    with pytest.raises(Finding, match=r"b \(rank 2 of this case\): one byte is wrong, region 0 offset 0"):
        rig.intact("now")
    b.ground.memory[CANARY] ^= 1


def test_a_byte_that_comes_after_the_case_is_noticed_at_its_end(context: Callable[[Subject], Context]) -> None:
    made = context(Subject("tcp"))
    rig = Rig.of(made)
    a, _ = rig.pair(SIZE)
    a.ground.memory[-1] ^= 1
    with pytest.raises(Finding, match="after the case"):
        made.close()


def test_what_a_transport_raises_names_the_call(context: Callable[[Subject], Context]) -> None:
    a, b = Rig.of(context(Subject("tcp"))).pair(SIZE)
    with pytest.raises(Finding, match=r"b#0: `connect` raised TransportError: the peer's metadata"):
        b.call("connect", a.info, b"nonsense")
    assert "metadata" in b.refusal("connect", a.info, b"nonsense")
    assert not b.refusal("connect", a.info, a.metadata())


def test_an_end_that_nobody_asked_for_and_a_second_one_are_noticed(context: Callable[[Subject], Context]) -> None:
    rig = Rig.of(context(Subject("tcp")))
    a, _ = rig.pair(SIZE)
    op_id = a.post(Peer("nobody", 0), Op.READ, piece(0, 1), piece(0, 1))
    rig.until(lambda: op_id in a.ended, "it ends")
    with pytest.raises(Finding, match="ended twice"):
        a._end(OpDone(op_id))
    with pytest.raises(Finding, match="no operation 77 was posted"):
        a._end(OpDone(77))


def test_what_does_not_happen_is_named_and_a_silent_descriptor_too(context: Callable[[Subject], Context]) -> None:
    rig = Rig.of(context(BROKEN_TRANSPORTS["tells-nobody"].subject))
    a, _ = rig.pair(SIZE)
    op_id = a.post(Peer("nobody", 0), Op.READ, piece(0, 1), piece(0, 1))
    with pytest.raises(Finding, match=r"its end: not within 0\.1 s; `poll` had it, but `fileno` did not say so"):
        rig.until(lambda: op_id in a.ended, "its end", limit_s=0.1)
    with pytest.raises(Finding, match=r"^nothing: not within 0\.1 s$"):
        rig.until(lambda: False, "nothing", limit_s=0.1)


def test_a_process_shares_its_memory_and_its_death_is_told(context: Callable[[Subject], Context]) -> None:
    rig = Rig.of(context(Subject("tcp")))
    here, there = rig.rank("here", SIZE), peer_process.start(rig, "there", SIZE)
    here.learn(there)
    there.learn(here)
    rig.finish(rig.post(here, there, Op.WRITE, piece(0, SIZE), piece(0, SIZE)))
    there.process.kill()
    with pytest.raises(Finding, match="there#0: its process died at `look`"):
        there.look()


def test_what_a_transport_raises_in_a_process_names_the_call(context: Callable[[Subject], Context]) -> None:
    rig = Rig.of(context(Subject("tcp")))
    there = peer_process.start(rig, "there", SIZE)
    nowhere = Descriptors.of([(9, 0, 1)])
    with pytest.raises(Finding, match="process of its own: `permit` raised TransportError"):
        there.permit("t", None, Op.READ, nowhere, STAMP)


def test_the_broken_ones_are_to_be_found_by_cases_that_exist() -> None:
    ids = [name for name, case in CASES.items() if case.id.startswith("KVX-TRN")]
    assert ids
    for broken in BROKEN_TRANSPORTS.values():
        assert broken.cause.endswith(".")
        for start in broken.found_by:
            assert any(name.startswith(start) for name in ids), start
        assert set(broken.proves) <= set(ids)
    assert CORRECT_TRANSPORTS["tcp"] == Subject("tcp")
