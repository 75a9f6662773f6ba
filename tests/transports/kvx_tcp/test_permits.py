"""The table of permissions, against sets of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core.errors import TransportError
from kvx.core.model import Descriptors, Op, Region, Stamp
from kvx.memory import Memory
from kvx_tcp.frames import Status
from kvx_tcp.permits import Permits
from kvx_tcp.span import Cursor, Span, coalesce

STAMP = Stamp("t", 1, 5)
SIZES = (40, 24)
BUFFERS = [np.zeros(size, dtype=np.uint8) for size in SIZES]
MEMORY = Memory([Region(at + 3, buffer.ctypes.data, len(buffer)) for at, buffer in enumerate(BUFFERS)])


@st.composite
def pieces(draw, least=0):
    region = draw(st.sampled_from((3, 4)))
    size = SIZES[region - 3]
    offset = draw(st.integers(0, size - least))
    return region, offset, draw(st.integers(least, size - offset))


def as_bytes(table):
    return {(region, at) for region, offset, length in table for at in range(offset, offset + length)}


@settings(deadline=None)
@given(st.lists(st.lists(pieces(), max_size=6), max_size=3), st.lists(pieces(), max_size=6))
def test_covered_exactly_where_every_byte_is_permitted(granted, asked):
    permits = Permits()
    for table in granted:
        permits.permit("p", Op.WRITE, Span(MEMORY, Descriptors.of(table)), STAMP)
    status = permits.check("p", Op.WRITE, STAMP, Span(MEMORY, Descriptors.of([p for p in asked if p[2]])))
    if not granted:
        assert status is Status.UNKNOWN
    else:
        covered = as_bytes(asked) <= as_bytes([piece for table in granted for piece in table])
        assert status is (Status.OK if covered else Status.BOUNDS)


def test_regions_that_touch_on_the_line_are_not_one():
    permits = Permits()
    permits.permit(None, Op.READ, Span(MEMORY, Descriptors.of([(3, 0, 40), (4, 0, 24)])), STAMP)
    with pytest.raises(TransportError, match="not registered"):
        Span(MEMORY, Descriptors.of([(3, 39, 2)]))
    assert permits.check("p", Op.READ, STAMP, Span(MEMORY, Descriptors.of([(3, 39, 1), (4, 0, 24)]))) is Status.OK


@pytest.mark.parametrize(
    ("peer", "op", "stamp", "status"),
    [
        ("p", Op.WRITE, STAMP, Status.OK),
        ("q", Op.WRITE, STAMP, Status.AUTH),
        ("p", Op.READ, STAMP, Status.BOUNDS),
        ("p", Op.WRITE, Stamp("t", 1, 4), Status.STALE),
        ("p", Op.WRITE, Stamp("t", 1, 6), Status.STALE),
        ("p", Op.WRITE, Stamp("t", 2, 5), Status.STALE),
        ("p", Op.WRITE, Stamp("u", 1, 5), Status.UNKNOWN),
    ],
)
def test_who_what_and_when(peer, op, stamp, status):
    permits = Permits()
    span = Span(MEMORY, Descriptors.of([(3, 0, 8)]))
    permits.permit("p", Op.WRITE, span, STAMP)
    assert permits.check(peer, op, stamp, span) is status
    permits.forbid("t")
    assert permits.check(peer, op, stamp, span) is Status.UNKNOWN


def test_a_fence_refuses_older_generations_of_one_peer_and_never_sinks():
    permits = Permits()
    span = Span(MEMORY, Descriptors.of([(3, 0, 8)]))
    permits.permit(None, Op.READ, span, STAMP)
    permits.fence("p", 6)
    permits.fence("p", 2)
    assert permits.check("p", Op.READ, STAMP, span) is Status.STALE
    assert permits.check("q", Op.READ, STAMP, span) is Status.OK
    permits.permit(None, Op.READ, span, Stamp("t", 1, 6))
    assert permits.check("p", Op.READ, Stamp("t", 1, 6), span) is Status.OK


@settings(deadline=None)
@given(st.lists(pieces(least=1), min_size=1, max_size=8), st.data())
def test_a_cursor_walks_exactly_its_bytes(table, data):
    for at, buffer in enumerate(BUFFERS):
        buffer[:] = np.arange(len(buffer)) + 100 * at
    span = Span(MEMORY, Descriptors.of(table))
    flat = b"".join(bytes(BUFFERS[region - 3][offset : offset + length]) for region, offset, length in table)
    start = data.draw(st.integers(0, span.nbytes - 1))
    length = data.draw(st.integers(1, span.nbytes - start))
    cursor, seen = Cursor(span, start, length), b""
    while cursor.remaining:
        views = cursor.views()
        assert all(len(view) for view in views)
        step = data.draw(st.integers(1, sum(map(len, views))))
        seen += b"".join(views)[:step]
        cursor.advance(step)
    assert seen == flat[start : start + length]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)), max_size=12))
def test_joined_pieces_mean_the_same_bytes(table):
    local = Descriptors.of([(region, offset, length) for region, offset, length, _ in table])
    remote = Descriptors.of([(region, other, length) for region, _, length, other in table])
    a, b = coalesce(local, remote)

    def walk(pieces):
        return [(region, offset + at) for region, offset, length in pieces.pieces() for at in range(length)]

    assert walk(a) == walk(local)
    assert walk(b) == walk(remote)
    assert a.length.tolist() == b.length.tolist()
    assert (a.length > 0).all()
