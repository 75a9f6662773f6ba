from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from kvx_vllm.pins import PoolPins


@define
class Pool:
    """As vLLM's BlockPool: a block is free without references; a freed one goes to the end of the queue."""

    num_gpu_blocks: int = 9
    references: list[int] = field(factory=lambda: [0] * 9)
    freed: list[int] = field(factory=list)

    @property
    def blocks(self) -> range:
        return range(self.num_gpu_blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            self.freed.append(block)

    def get_num_free_blocks(self) -> int:
        return self.references.count(0)


def test_what_is_held_is_counted_and_given_back_tail_first() -> None:
    pool = Pool()
    pins = PoolPins(pool)
    assert (pins.held, pins.free, pins.total) == (0, 9, 8)
    pins.hold("a", [1, 2])
    pins.hold("b", [2, 3, 4])
    pins.hold("a", [5])
    assert (pins.held, pins.free, pool.references[2]) == (6, 4, 2)
    pins.drop("a")
    assert (pins.held, pins.free, pool.freed) == (3, 6, [5, 2, 1])
    pins.drop("a")  # its blocks are back already
    pins.drop("b")
    assert (pins.held, pins.free, pool.freed) == (0, 9, [5, 2, 1, 4, 3, 2])
