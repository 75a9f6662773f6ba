"""A prefill rank and a decode rank in one process, over TCP, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvx.cluster import free_ports
from kvx_conformance.proxy import Proxy

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


def ints(*items: int) -> Any:
    return np.array(items, np.int32)


class Pair:
    """A prefill and a decode rank, and requests that meet on them."""

    def __init__(
        self,
        rig: Any,
        prefill: Any = None,
        decode: Any = None,
        prefill_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rig = rig
        self.p, self.d = prefill or rig.buffers(1), decode or rig.buffers(2)
        self.pm = rig.prefill(self.p, **options, **(prefill_options or {}))
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
        self.rig.until("all fail", lambda: all(status == FAILED for status in [end.poll() for end in ends]))
        texts = []
        for end in ends:
            with pytest.raises(Exception, match="KVTransferError") as error:
                end.failure_exception()
            texts.append(error.value.failure_reason)  # type: ignore[attr-defined]
            end.clear()
        return texts

    def serves(self) -> None:
        """One more request is moved as it should be, and then nothing is left of any."""
        sender, receiver = self.meet([9])
        sender.send(ints(3))
        self.succeed(sender, receiver)
        assert self.same([3], [9])
        self.clean()

    def clean(self) -> None:
        """Nothing is left of any request."""
        self.rig.until("all pages are released", lambda: self.dm.pump() or not self.dm.rooms.receives)
        self.rig.until("all rooms are closed", lambda: self.pm.pump() or not self.pm.rooms.sends)
        for manager in (self.pm, self.dm):
            assert not manager.request_status
            assert not manager.failure_records
            self.rig.until("kvx has nothing open", lambda: not manager.kvx.snapshot()["open"])  # noqa: B023

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


def test_a_full_prefix_hit_moves_metadata_only(pair: Pair) -> None:
    before = pair.d.copy()
    sender, receiver = pair.meet([], prefix=80)
    assert sender.should_send_kv_chunk(0, True)
    assert not sender.should_send_kv_chunk(0, False)
    sender.send(ints())
    pair.succeed(sender, receiver)
    assert pair.same_row()
    assert all((old == new).all() for old, new in zip(before, pair.d.kv, strict=False))
    pair.clean()


def test_pages_behind_the_decode_side_s_prefix(pair: Pair) -> None:
    sender, receiver = pair.meet([7, 8], prefix=48)
    sender.send(ints(11, 12))
    pair.succeed(sender, receiver)
    assert pair.same([11, 12], [7, 8])
    assert sender.get_transfer_metric().transfer_total_bytes == 2 * sum(pair.pm.kv_args.kv_item_lens)
    pair.clean()


def test_decode_may_publish_before_prefill_has_the_request(pair: Pair) -> None:
    receiver = pair.rig.receiver(pair.dm, 7)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    pair.rig.until("the offer is there", lambda: pair.pm.kvx.snapshot()["open"])
    sender = pair.rig.sender(pair.pm, 7)
    pair.rig.until("prefill may send", lambda: sender.poll() == WAITING)
    sender.init(1, 0)
    sender.send(ints(8))
    pair.succeed(sender, receiver)
    assert pair.same([8], [6])
    assert pair.same_row(0, 1)
    pair.clean()


# ------------------------------------------------------------------------------- aborts


def test_decode_aborts_before_it_has_pages(pair: Pair) -> None:
    sender, receiver = pair.rig.sender(pair.pm, 5), pair.rig.receiver(pair.dm, 5)
    receiver.abort()
    texts = pair.fail(sender, receiver)
    assert texts == ["kvx: aborted: the decode side gave the request up", "Aborted by AbortReq."]
    pair.clean()


def test_pages_that_decode_cannot_publish_end_the_request_on_both_sides(pair: Pair) -> None:
    """Refused by decode itself, long before the prefill server's own limit."""
    sender, receiver = pair.rig.sender(pair.pm, 5), pair.rig.receiver(pair.dm, 5)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=3)
    assert pair.fail(receiver) == ["kvx: a prefix of 3 tokens is not made of whole pages"]
    assert pair.fail(sender) == ["kvx: aborted: the decode side gave the request up"]
    pair.clean()


def test_a_request_that_is_cleared_before_it_has_pages_ends_on_both_sides(pair: Pair) -> None:
    sender, receiver = pair.rig.sender(pair.pm, 5), pair.rig.receiver(pair.dm, 5)
    receiver.clear()
    receiver.clear()
    assert pair.fail(sender) == ["kvx: aborted: the decode side gave the request up"]
    pair.clean()


def test_decode_aborts_before_prefill_has_the_request(pair: Pair) -> None:
    receiver = pair.rig.receiver(pair.dm, 5)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    pair.rig.until("the offer is there", lambda: pair.pm.kvx.snapshot()["open"])
    receiver.abort()
    pair.fail(receiver)
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(5, 1))
    sender = pair.rig.sender(pair.pm, 5)
    assert pair.fail(sender)[0].startswith("kvx: aborted")
    pair.clean()


def test_decode_aborts_while_prefill_computes(pair: Pair) -> None:
    before = pair.d.copy()
    sender, receiver = pair.meet([9, 3])
    receiver.abort()
    assert receiver.poll() == FAILED
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1))
    sender.send(ints(1, 2))  # too late, or just not
    texts = pair.fail(sender, receiver)
    assert "Aborted by AbortReq." in texts[0]
    assert texts[1] == "Aborted by AbortReq."
    pair.rig.until("nothing is open", lambda: not pair.pm.kvx.snapshot()["open"])
    assert all((old == new).all() for old, new in zip(before, pair.d.copy(), strict=True))
    pair.clean()


def test_decode_aborts_between_two_chunks(pair: Pair) -> None:
    sender, receiver = pair.meet([9, 3])
    sender.send(ints(1))
    pair.rig.until("the first chunk has landed", lambda: pair.same([1], [9]))
    receiver.abort()
    pair.fail(sender, receiver)
    sender.send(ints(2))
    pair.clean()
    assert not pair.same([2], [3])


def test_prefill_aborts_before_decode_has_pages(pair: Pair) -> None:
    sender, receiver = pair.rig.sender(pair.pm, 5), pair.rig.receiver(pair.dm, 5)
    sender.abort()
    assert pair.fail(sender) == ["Aborted by AbortReq."]
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    pair.rig.until("prefill has refused", lambda: pair.pm.pump() or receiver.poll() == FAILED)
    assert pair.fail(receiver) == ["kvx: aborted: Aborted by AbortReq."]
    pair.clean()


@pytest.mark.parametrize("chunks", [0, 1])
def test_prefill_aborts(pair: Pair, chunks: int) -> None:
    sender, receiver = pair.meet([9, 3])
    for page in range(chunks):
        sender.send(ints(page))
    sender.abort()
    texts = pair.fail(sender, receiver)
    assert texts == ["Aborted by AbortReq.", "kvx: aborted: Aborted by AbortReq."]
    pair.clean()


def test_an_abort_after_success_changes_nothing(pair: Pair) -> None:
    sender, receiver = pair.meet([9])
    sender.send(ints(1))
    pair.rig.until("both have ended", lambda: not (pair.pm.kvx.snapshot()["open"] or pair.dm.kvx.snapshot()["open"]))
    pair.pm.pump()
    sender.abort()
    pair.succeed(sender, receiver)
    pair.clean()


def test_a_request_that_is_cleared_without_a_word_ends_on_both_sides(pair: Pair) -> None:
    sender, receiver = pair.meet([9, 3])
    sender.send(ints(1))
    sender.clear()
    pair.fail(receiver)
    pair.clean()
    sender, receiver = pair.meet([9, 3])
    receiver.clear()
    pair.fail(sender)
    pair.clean()


def test_a_room_may_be_used_again(pair: Pair) -> None:
    for attempt in range(3):
        sender, receiver = pair.rig.sender(pair.pm, 77), pair.rig.receiver(pair.dm, 77)
        receiver.send_metadata(ints(6 + attempt), 1, None, decode_prefix_len=0)
        pair.rig.until("prefill may send", lambda: sender.poll() == WAITING)  # noqa: B023
        sender.init(1, 0)
        if attempt == 1:
            receiver.abort()
            pair.fail(sender, receiver)
        else:
            sender.send(ints(8))
            pair.succeed(sender, receiver)
            assert pair.same([8], [6 + attempt])
    pair.clean()


# ------------------------------------------------------------- pages that may be written


def gated(rig: Any, kind: str) -> tuple[Pair, Any]:
    """A pair whose bytes wait while a file exists."""
    gate = rig.folder / "gate"
    name = f"kvx_conformance.faults:{kind}"
    pair = Pair(rig, transports=[name], drain_limit_s=8, grace_s=10, lease_s=12, **{name: {"gate": str(gate)}})
    gate.touch()
    return pair, gate


def test_decode_s_pages_are_safe_at_once_where_the_transport_can_forbid(rig: Any) -> None:
    pair, gate = gated(rig, "Gate")
    before = pair.d.copy()
    sender, receiver = pair.meet([9, 3])
    sender.send(ints(1, 2))
    pair.rig.until("its bytes are under way", lambda: "moving" in str(pair.pm.kvx.snapshot()["open"]))
    receiver.abort()
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1), 5)
    gate.unlink()
    pair.fail(sender, receiver)
    pair.clean()
    assert all((old == new).all() for old, new in zip(before, pair.d.copy(), strict=True))


def test_decode_s_pages_are_held_until_prefill_has_stopped_where_the_transport_cannot(rig: Any) -> None:
    pair, gate = gated(rig, "StubbornRegionAccess")
    sender, receiver = pair.meet([9, 3])
    sender.send(ints(1, 2))
    pair.rig.until("its bytes are under way", lambda: "moving" in str(pair.pm.kvx.snapshot()["open"]))
    receiver.abort()
    assert receiver.poll() == FAILED, "the client need not wait"
    pair.rig.until("prefill drains", lambda: "draining" in str(pair.pm.kvx.snapshot()["open"]))
    for _ in range(50):
        assert not pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1)
        assert sender.poll() == WAITING, "its pages are still read"
    gate.unlink()
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1))
    pair.fail(sender, receiver)
    pair.clean()


def test_a_failure_of_prefill_is_held_back_while_its_pages_are_read(rig: Any) -> None:
    pair, gate = gated(rig, "StubbornRegionAccess")
    sender, receiver = pair.meet([9, 3])
    sender.send(ints(1))
    pair.rig.until("its bytes are under way", lambda: "moving" in str(pair.pm.kvx.snapshot()["open"]))
    sender.abort()
    pair.rig.until("it drains", lambda: "draining" in str(pair.pm.kvx.snapshot()["open"]))
    assert [sender.poll() for _ in range(50)] == [WAITING] * 50
    gate.unlink()
    assert pair.fail(sender, receiver) == ["Aborted by AbortReq.", "kvx: aborted: Aborted by AbortReq."]
    pair.clean()


# ------------------------------------------------------------ what SGLang does not compare


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"page": 32}, "page size 16"),
        ({"layers": 4}, "layers differs"),
        ({"head_bytes": 32}, "bytes and pieces of a block of layer 'kv.0.0'"),
        ({"aux": 2}, "layers differs"),
        ({"states": [("mamba", [48])]}, "groups: "),
    ],
    ids=["page size", "layers", "item length", "aux buffers", "state components"],
)
def test_another_geometry_is_refused_per_request(rig: Any, change: dict[str, Any], fact: str) -> None:
    pair = Pair(rig, decode=rig.buffers(2, **change))
    for room in (1, 2):
        receiver = rig.receiver(pair.dm, room)
        states = [[np.array(1)]] if "states" in change else None
        receiver.send_metadata(ints(6), 1, states, decode_prefix_len=0)
        assert fact in (text := pair.fail(receiver)[0]), text
        assert text.startswith("kvx: layout: ")


@pytest.mark.parametrize(("change", "fact"), [({"dtype": "bfloat16"}, "dtype"), ({"total_heads": 8}, "total_heads")])
def test_other_facts_are_refused_too(rig: Any, change: dict[str, Any], fact: str) -> None:
    pm = rig.prefill(rig.buffers(1))
    dm = rig.decode(rig.buffers(2), **change)
    receiver = rig.receiver(dm, 1)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    rig.until("refused", lambda: receiver.poll() == FAILED)
    with pytest.raises(Exception, match=fact):
        receiver.failure_exception()
    assert pm.kvx.snapshot()["open"] == {}


def test_page_counts_that_differ_fail_both_sides(pair: Pair) -> None:
    sender, receiver = pair.meet([9, 3], pages=1)
    sender.send(ints(1))
    texts = pair.fail(sender, receiver)
    assert all("bounds" in text and "tokens" in text for text in texts), texts
    pair.clean()


@pytest.mark.parametrize("items", [{"pages": 32}, {"pages": -1}, {"row": 8}])
def test_items_that_no_buffer_has_are_refused_before_a_byte_moves(pair: Pair, items: dict[str, int]) -> None:
    receiver = pair.rig.receiver(pair.dm, 3)
    receiver.send_metadata(ints(items.get("pages", 1)), items.get("row", 1), None, decode_prefix_len=0)
    assert "of a buffer of" in pair.fail(receiver)[0]
    sender, receiver = pair.meet([9], p_row=items.get("row", 1))
    sender.send(ints(items.get("pages", 1)))
    texts = pair.fail(sender, receiver)
    assert all("of a buffer of" in text for text in texts), texts
    pair.clean()


def test_decode_goes_only_where_it_may(rig: Any) -> None:
    pair = Pair(rig)
    strict = rig.decode(pair.d, peers="192.0.2.1")
    receiver = rig.receiver(strict, 1)
    receiver.send_metadata(ints(1), 1, None, decode_prefix_len=0)
    assert "option peers" in pair.fail(receiver)[0]


# --------------------------------------------------------------------- state components


STATES = [("mamba", [48, 200]), ("swa", [96]), ("dsa_tail", [32])]


def test_state_components_come_with_the_last_chunk(rig: Any) -> None:
    pair = Pair(rig, rig.buffers(1, states=STATES), rig.buffers(2, states=STATES))
    before = pair.d.copy()
    sender, receiver = pair.meet([9, 3], states=[[np.array(5)], ints(1, 2, 7), None])
    sender.send(ints(1))
    sender.send(ints(2), [[np.array(4)], [3, 4, 5], ints()])
    pair.succeed(sender, receiver)
    assert pair.same([1, 2], [9, 3])
    p, d = (dict(side.states) for side in (pair.p, pair.d))
    assert all((a[4] == b[5]).all() for a, b in zip(p["mamba"], d["mamba"], strict=True))
    assert (p["swa"][0][[3, 4, 5]] == d["swa"][0][[1, 2, 7]]).all()
    assert (before[-1] == d["dsa_tail"][0]).all()
    pair.clean()


def test_state_counts_that_differ_fail_both_sides(rig: Any) -> None:
    pair = Pair(rig, rig.buffers(1, states=STATES), rig.buffers(2, states=STATES))
    for mine in ([[4], [3, 4], []], [[4], [3, 4, 5, 6], []], None):
        sender, receiver = pair.meet([9], states=[[5], [1, 2, 7], None])
        sender.send(ints(1), mine)
        texts = pair.fail(sender, receiver)
        assert all("items of aux and state" in text for text in texts), texts
    pair.clean()


# ------------------------------------------------------------------ times, losses, restarts


def test_nobody_publishes(pair: Pair) -> None:
    pair.pm.bootstrap_timeout = 0.2
    sender = pair.rig.sender(pair.pm, 12)
    assert "timed out" in pair.fail(sender)[0]
    pair.clean()


def test_prefill_never_gets_the_request(pair: Pair) -> None:
    receiver = pair.rig.receiver(pair.dm, 12)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    assert pair.fail(receiver)[0].startswith("kvx: lease_ended")
    pair.clean()


def test_decode_waits_no_longer_than_sglang_says(pair: Pair) -> None:
    sender, receiver = pair.meet([1])
    pair.dm.waiting_timeout = 0.2
    texts = pair.fail(receiver, sender)
    assert all("timed out" in text for text in texts), texts
    pair.clean()


def test_prefill_that_never_sends_has_a_bound_too(pair: Pair) -> None:
    """SGLang has none once its prefill has seen the pages."""
    sender, receiver = pair.meet([1])
    texts = pair.fail(sender, receiver)
    assert all("kvx: patience" in text for text in texts), texts
    pair.clean()


def test_the_next_chunk_never_comes(pair: Pair) -> None:
    sender, receiver = pair.meet([1, 2])
    sender.send(ints(5))
    texts = pair.fail(sender, receiver)
    assert all("kvx: patience: the next part did not come" in text for text in texts), texts
    pair.clean()


def test_rooms_are_swept_by_age(pair: Pair) -> None:
    pair.pm.rooms.keep_s = 0.3
    receiver = pair.rig.receiver(pair.dm, 12)
    receiver.send_metadata(ints(6), 1, None, decode_prefix_len=0)
    pair.rig.until("the offer is there", lambda: pair.pm.pump() or pair.pm.rooms._offers)
    receiver.abort()
    pair.fail(receiver)
    sender = pair.rig.sender(pair.pm, 13)
    sender.abort()  # and SGLang never clears it
    pair.rig.until("all is forgotten", lambda: pair.pm.pump() or not (pair.pm.rooms._offers or pair.pm.rooms.sends))
    pair.rig.until("refusals too", lambda: pair.pm.pump() or not pair.pm.rooms._refused)
    pair.clean()


def test_decode_stops_and_comes_back_at_the_same_ports(pair: Pair) -> None:
    sender, _ = pair.meet([1, 2])
    sender.send(ints(5))
    port = pair.dm.port
    pair.rig.stop(pair.dm)
    assert "kvx: draining" in pair.fail(sender)[0]
    pair.dm = pair.rig.decode(pair.d, port=port)
    pair.serves()


def test_prefill_stops_and_comes_back_at_the_same_ports(pair: Pair) -> None:
    sender, receiver = pair.meet([1, 2])
    sender.send(ints(5))
    port = pair.pm.port
    pair.rig.stop(pair.pm)
    assert "kvx: draining" in pair.fail(receiver)[0]
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1))
    pair.pm = pair.rig.prefill(pair.p, port=port)
    pair.serves()


def test_a_link_that_breaks_for_good_ends_both_sides_and_a_new_one_serves(rig: Any) -> None:
    outer, inner = free_ports(2)
    with link(outer, inner):
        pair = Pair(rig, prefill_options={"port": inner, "advertise": f"127.0.0.1:{outer}"})
        sender, receiver = pair.meet([1, 2])
        sender.send(ints(5))
    texts = pair.fail(sender, receiver)
    assert all("kvx: peer_lost" in text for text in texts), texts
    pair.rig.until("its pages are safe", lambda: pair.dm.is_abort_release_safe(receiver.bootstrap_room, 1))
    assert pair.rig.address not in pair.dm.prefill_info_table, "what comes back may be another one"
    with link(outer, inner):
        pair.rig.until("decode asks again", lambda: pair.dm.try_ensure_parallel_info(pair.rig.address))
        pair.serves()


@contextmanager
def link(outer: int, inner: int) -> Iterator[None]:
    """Between `outer`, where decode dials, and `inner`, where prefill listens."""
    proxy = Proxy()
    proxy.front("control", "p", outer, inner)
    proxy.open("p")
    yield
    proxy.close()


def test_prefill_restarts_between_two_requests_and_decode_serves_on(pair: Pair) -> None:
    sender, receiver = pair.meet([9])
    sender.send(ints(3))
    pair.succeed(sender, receiver)
    port = pair.pm.port
    pair.rig.stop(pair.pm)
    pair.pm = pair.rig.prefill(pair.p, port=port)
    sender, receiver = pair.meet([10])
    sender.send(ints(4))
    pair.succeed(sender, receiver)
    assert pair.same([4], [10])
    pair.clean()
