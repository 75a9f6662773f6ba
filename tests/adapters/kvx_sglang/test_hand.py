"""A prefill rank and a decode rank in one process, over TCP, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


def ints(*items: int) -> Any:
    return np.array(items, np.int32)


class Pair:
    """A prefill and a decode rank, and requests that meet on them."""

    def __init__(self, rig: Any, prefill: Any = None, decode: Any = None, **options: Any) -> None:
        self.rig = rig
        self.p, self.d = prefill or rig.buffers(1), decode or rig.buffers(2)
        self.pm = rig.prefill(self.p, **options)
        self.dm = rig.decode(self.d, **options)
        self._room = 1000

    def meet(
        self, d_pages: Any, *, d_row: int = 6, p_row: int = 2, pages: int | None = None, prefix: int = 0,
        states: list[Any] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """A sender that may send, and the receiver that waits for it."""
        self._room += 1
        sender, receiver = self.rig.sender(self.pm, self._room), self.rig.receiver(self.dm, self._room)
        assert (sender.poll(), receiver.poll()) == (BOOTSTRAPPING, WAITING)
        receiver.send_metadata(ints(*d_pages), d_row, states, decode_prefix_len=prefix)
        self.rig.until("prefill hears of the pages", lambda: sender.poll() == WAITING)
        assert sender.pop_decode_prefix_len() == prefix
        sender.init(len(d_pages) if pages is None else pages, p_row)
        return sender, receiver

    def succeed(self, sender: Any, receiver: Any) -> None:
        self.rig.until("both succeed", lambda: (sender.poll(), receiver.poll()) == (SUCCESS, SUCCESS))
        sender.clear()
        receiver.clear()

    def fail(self, *ends: Any) -> list[str]:
        """Both ends fail; what their clients read."""
        self.rig.until("all fail", lambda: all([end.poll() == FAILED for end in ends]))
        texts = []
        for end in ends:
            with pytest.raises(Exception, match="KVTransferError") as error:
                end.failure_exception()
            texts.append(error.value.failure_reason)  # type: ignore[attr-defined]
            end.clear()
        return texts

    def clean(self) -> None:
        """Nothing is left of any request."""
        self.rig.until("decode pages are safe", lambda: self.dm.is_abort_release_safe(self._room, 1))
        self.pm.pump()
        for manager in (self.pm, self.dm):
            assert not manager.request_status
            assert not manager.failure_records
            self.rig.until("kvx has nothing open", lambda: not manager.kvx.snapshot()["open"])  # noqa: B023
        assert not self.pm.rooms.sends
        assert not self.dm.rooms.receives

    def same(self, p_pages: list[int], d_pages: list[int]) -> bool:
        return all((a[p_pages] == b[d_pages]).all() for a, b in zip(self.p.kv, self.d.kv, strict=True))

    def same_row(self, p_row: int = 2, d_row: int = 6) -> bool:
        return all((a[p_row] == b[d_row]).all() for a, b in zip(self.p.aux, self.d.aux, strict=True))


@pytest.fixture
def pair(rig: Any) -> Iterator[Pair]:
    return Pair(rig)


def test_two_chunks_move_their_pages_and_nothing_else(pair: Pair) -> None:
    before = pair.d.copy()
    sender, receiver = pair.meet([9, 3, 30, 1, 4])
    sender.send(ints(1, 2, 3))
    pair.rig.until("the first chunk has landed", lambda: pair.same([1, 2, 3], [9, 3, 30]))
    assert (sender.poll(), receiver.poll()) == (WAITING, WAITING), "a middle chunk concludes nothing"
    assert not pair.same_row()
    sender.send(ints(20, 21))
    pair.succeed(sender, receiver)
    assert pair.same([1, 2, 3, 20, 21], [9, 3, 30, 1, 4])
    assert pair.same_row()
    rest = [page for page in range(32) if page not in (9, 3, 30, 1, 4)]
    assert all((old[rest] == new[rest]).all() for old, new in zip(before, pair.d.kv, strict=False))
    pair.clean()
