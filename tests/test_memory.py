from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.core.errors import TransportError
from kvx.core.model import Descriptors, Region
from kvx.memory import Memory, Ranges

BUFFER = np.zeros(256, dtype=np.uint8)
BASE = BUFFER.ctypes.data
MEMORY = Memory([Region(7, BASE, 100), Region(2, BASE + 100, 100)])
PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def test_addresses_are_those_of_the_right_region() -> None:
    assert MEMORY.addresses(Descriptors.of([(2, 3, 4), (7, 5, 95)])).tolist() == [BASE + 103, BASE + 5]


def test_an_address_outside_is_refused() -> None:
    with pytest.raises(TransportError, match="region 7, offset 5, length 96"):
        MEMORY.addresses(Descriptors.of([(7, 5, 96)]))


def test_stretches_of_two_regions_never_touch() -> None:
    starts, ends = MEMORY.stretches(Descriptors.of([(2, 0, 100), (7, 0, 100)]))
    allowed = Ranges()
    allowed.add(starts, ends)
    assert len(allowed.starts) == 2
    assert not allowed.cover(starts[:1], ends[:1] + 1)


@given(PAIRS, PAIRS, PAIRS)
def test_ranges_cover_what_a_set_of_bytes_would(
    first: list[tuple[int, int]], second: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    allowed = Ranges()
    for some in (first, second):
        table = np.array(some, dtype=np.int64).reshape(-1, 2)
        allowed.add(table[:, 0], table[:, 1])
    bytes_of = {at for start, end in first + second for at in range(start, end)}
    whole = [(start, end) for start, end in asked if start < end]
    table = np.array(whole, dtype=np.int64).reshape(-1, 2)
    expected = all(set(range(start, end)) <= bytes_of for start, end in whole)
    assert allowed.cover(table[:, 0], table[:, 1]) is expected
