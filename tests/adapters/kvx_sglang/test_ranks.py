"""Ranks of unequal numbers by hand: every rank of both sides in one process, heads compared one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
EPOCHS = {"prefill": 11, "decode": 22}


class Group:
    """The ranks of one role: they start at the same port and share their epoch, as one server's do."""

    def __init__(self, rig: Any, role: str, size: int, total_heads: int, *, mla: bool = False) -> None:
        port = consecutive(size)
        seeds = [100 * len(role) + (0 if mla else rank) for rank in range(size)]  # with MLA all hold the same
        heads = 1 if mla else max(1, total_heads // size)
        self.buffers = [rig.buffers(seed, heads=heads, layers=3 if mla else 6) for seed in seeds]
        self.managers = [
            rig.manager(role, buffers, port=port, tp=(rank, size), mla=mla, total_heads=total_heads, epoch=EPOCHS[role])
            for rank, buffers in enumerate(self.buffers)
        ]

    def head(self, head: int, total_heads: int, layer: int, pages: list[int]) -> Any:
        """One head's bytes, [token][byte], wherever this group has it."""
        size = len(self.buffers)
        rank, place = (head * size // total_heads, head % (total_heads // size)) if total_heads >= size else (
            head * size // total_heads, 0,
        )  # fmt: skip
        return self.buffers[rank].tokens(layer, pages)[:, place]


def consecutive(count: int) -> int:
    """A port after which `count` are free; ranks listen side by side."""
    import socket

    for start in range(21000, 31000, 16):
        try:
            for port in range(start, start + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return start
    raise AssertionError("no ports are free")


def exchange(
    rig: Any, p: Group, d: Group, room: int, pages: tuple[int, int] = (9, 3), row: int = 6
) -> tuple[list[Any], list[Any]]:
    for manager in d.managers:
        rig.until("all prefill ranks are known", lambda: manager.try_ensure_parallel_info(rig.address))  # noqa: B023
    senders = [rig.sender(manager, room) for manager in p.managers]
    receivers = [rig.receiver(manager, room) for manager in d.managers]
    for receiver in receivers:
        receiver.send_metadata(np.array(pages, np.int32), row, None, decode_prefix_len=16)
    rig.until("prefill may send", lambda: {sender.poll() for sender in senders} == {WAITING})
    for sender in senders:
        assert sender.pop_decode_prefix_len() == 16
        sender.init(2, 2)
    return senders, receivers


def finish(rig: Any, senders: list[Any], receivers: list[Any]) -> None:
    for sender in senders:
        sender.send(np.array([1], np.int32))
    for sender in senders:
        sender.send(np.array([2], np.int32))
    rig.until("all succeed", lambda: {end.poll() for end in [*senders, *receivers]} == {SUCCESS})
    for end in [*senders, *receivers]:
        end.clear()


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"),
    [(1, 1, 4), (2, 2, 4), (2, 1, 4), (1, 2, 4), (4, 1, 4), (1, 4, 4), (2, 4, 2), (4, 2, 2)],
)
def test_every_head_comes_from_the_rank_that_has_it(rig: Any, prefill: int, decode: int, heads: int) -> None:
    p, d = Group(rig, "prefill", prefill, heads), Group(rig, "decode", decode, heads)
    finish(rig, *exchange(rig, p, d, room=1))
    for layer in range(6):
        for head in range(heads):
            assert (p.head(head, heads, layer, [1, 2]) == d.head(head, heads, layer, [9, 3])).all(), (layer, head)
    for rank, buffers in enumerate(d.buffers):
        rows = [
            any((row[6] == theirs.aux[index][2]).all() for theirs in p.buffers) for index, row in enumerate(buffers.aux)
        ]
        assert all(rows), rank


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_mla_pages_are_the_same_on_every_rank(rig: Any, prefill: int, decode: int) -> None:
    p, d = Group(rig, "prefill", prefill, 1, mla=True), Group(rig, "decode", decode, 1, mla=True)
    finish(rig, *exchange(rig, p, d, room=1))
    for buffers in d.buffers:
        assert all(
            (mine[[9, 3]] == theirs[[1, 2]]).all() for mine, theirs in zip(buffers.kv, p.buffers[0].kv, strict=True)
        )


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_one_rank_that_gives_up_ends_its_request_on_all(rig: Any, prefill: int, decode: int) -> None:
    """SGLang tells its other ranks of a failure by the smallest status of all."""
    p, d = Group(rig, "prefill", prefill, 4), Group(rig, "decode", decode, 4)
    senders, receivers = exchange(rig, p, d, room=1)
    receivers[0].abort()

    def all_failed() -> bool:
        for group in (senders, receivers):
            statuses = [end.poll() for end in group]
            if min(statuses) == FAILED:
                for end in group:
                    end.abort()
        return {end.poll() for end in [*senders, *receivers]} == {FAILED}

    rig.until("all fail", all_failed)
    for manager in d.managers:
        rig.until("its pages are safe", lambda: manager.is_abort_release_safe(1, 1))  # noqa: B023
    for end in [*senders, *receivers]:
        end.clear()
    finish(rig, *exchange(rig, p, d, room=2))


@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (2, 4)])
def test_one_of_fifty_requests_fails_and_the_others_have_their_bytes(rig: Any, prefill: int, decode: int) -> None:
    p, d = Group(rig, "prefill", prefill, 4), Group(rig, "decode", decode, 4)
    served = 0
    for batch in range(10):
        open_now = {}
        for slot in range(5):
            pages = (2 + 2 * slot, 3 + 2 * slot)
            open_now[slot] = (pages, exchange(rig, p, d, 1 + batch * 5 + slot, pages, row=slot))
        if batch == 4:
            _, (senders, receivers) = open_now.pop(2)
            receivers[-1].abort()
            rig.until("it fails", lambda: FAILED in {sender.poll() for sender in senders})  # noqa: B023
            for end in [*senders, *receivers]:
                end.abort()
                end.clear()
        for buffers in d.buffers:
            for buffer in buffers.kv:
                buffer[2:12] = 0
        for pages, (senders, receivers) in open_now.values():
            finish(rig, senders, receivers)
            served += 1
            for head in range(4):
                assert (p.head(head, 4, batch % 6, [1, 2]) == d.head(head, 4, batch % 6, list(pages))).all()
    assert served == 49
    for manager in [*p.managers, *d.managers]:
        rig.until("nothing is open", lambda: manager.pump() or not manager.kvx.snapshot()["open"])  # noqa: B023


def test_what_cannot_be_cut_is_refused(rig: Any) -> None:
    """State components belong to one rank each: they need equal TP."""
    port = consecutive(2)
    states = [("mamba", [48])]
    rig.prefill(rig.buffers(1, states=states))
    manager = rig.manager("decode", rig.buffers(2, heads=2, states=states), port=port, tp=(0, 2), epoch=22)
    rig.until("prefill is known", lambda: manager.try_ensure_parallel_info(rig.address))
    receiver = rig.receiver(manager, 1)
    receiver.send_metadata(np.array([1], np.int32), 1, [[1]], decode_prefix_len=0)
    rig.until("refused", lambda: receiver.poll() == FAILED)
    with pytest.raises(Exception, match="total_heads"):
        receiver.failure_exception()
