"""The pool of blocks against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx_reference.engine.cache import BlockPool, block_hash, salt_hash


def test_the_block_that_was_freed_first_is_reused_first_and_loses_its_content() -> None:
    pool = BlockPool(4)
    a = pool.allocate(2) or []
    b = pool.allocate(2) or []
    assert pool.allocate(1) is None
    for at, block in enumerate([*a, *b]):
        pool.remember(block, bytes([at]))
    pool.release(b)
    pool.release(a)
    assert pool.find([bytes([2])]) == [b[0]]
    # The tail of a table goes before its head.
    assert pool.allocate(3) == [b[1], b[0], a[1]]
    assert pool.find([bytes([2])]) == []
    assert pool.find([bytes([0]), bytes([1])]) == [a[0]]


def test_a_free_block_that_is_shared_is_taken_out_of_the_free_ones() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.remember(block, b"x")
    pool.release([block])
    pool.share([block])
    assert pool.free == 1
    assert pool.allocate(2) is None
    pool.release([block])
    assert pool.free == 2


def test_held_blocks_stay_until_they_are_dropped() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2) or []
    pool.hold("t", blocks[:1])
    pool.hold("t", blocks[1:])
    pool.release(blocks)
    assert (pool.free, pool.held) == (1, 2)
    pool.drop("t")
    pool.drop("t")
    pool.drop("never held")
    assert (pool.free, pool.held) == (3, 0)


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.release(blocks)


def test_a_hash_is_of_the_whole_prefix_and_of_the_salt() -> None:
    first, other = block_hash(salt_hash(""), [1, 2]), block_hash(salt_hash(""), [1, 3])
    assert block_hash(first, [4, 5]) != block_hash(other, [4, 5])
    assert block_hash(salt_hash("a"), [1, 2]) != first
    assert block_hash(salt_hash(""), [1, 2]) == first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "share", "hold", "drop"]), st.integers(0, 5))))
def test_references_and_free_blocks_always_add_up(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    tables: list[list[int]] = []
    held: dict[str, list[int]] = {}
    for action, number in actions:
        table = tables[number % len(tables)] if tables else []
        if action == "allocate":
            if (blocks := pool.allocate(number)) is not None:
                tables.append(blocks)
        elif action == "release" and tables:
            tables.remove(table)
            pool.release(table)
        elif action == "share" and tables:
            pool.share(table)
            tables.append(list(table))
        elif action == "hold":
            pool.hold(str(number), table)
            held.setdefault(str(number), []).extend(table)
        elif action == "drop":
            pool.drop(str(number))
            held.pop(str(number), None)
        wanted = [block for each in [*tables, *held.values()] for block in each]
        assert sorted(pool.in_use().elements()) == sorted(wanted)
        assert pool.free == 6 - len(set(wanted))
        assert pool.held == sum(map(len, held.values()))
