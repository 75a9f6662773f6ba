"""The tables alone: what they put, and what they tell SGLang, for every order of calls and news."""

from __future__ import annotations

from typing import Any

import pytest

from kvx.core.model import BlockTable, Grant, Mode, Offered, Outcome, Part, Peer, Reason, Released
from kvx.engine import Abort, Claim, Expose, Stage
from kvx.testing import FakeInstance
from kvx_sglang.layout import Buffer, Facts, State, describe
from kvx_sglang.rooms import DecodeRooms, Ended, Forgotten, PrefillRooms, Ready, room_in, transfer_name

POOLS = describe(
    Facts(
        *("m", "float32", 16, (Buffer(4096, 4096 * 32, 4096),), (Buffer(1 << 30, 512, 64),)),
        states=(State("swa", (Buffer(1 << 31, 320, 32),)),),
    )
)
NAME = "7.ab.1"
ROOM = 7


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def prefill() -> tuple[PrefillRooms, FakeInstance, Clock]:
    instance, clock = FakeInstance(POOLS.layout), Clock()
    return PrefillRooms(instance.put, POOLS, clock, keep_s=30), instance, clock


def offered(
    name: str = NAME, *, pages: tuple[int, ...] = (9, 3), row: tuple[int, ...] = (6,), prefix: int = 1
) -> Offered:
    tokens = (prefix + len(pages)) * 16
    blocks = BlockTable((pages, row, (4, 5)))
    first = (prefix, tokens - len(row), tokens - 2)
    return Offered(Grant(name, Peer("d", 0), 3, 0, Mode.PUSH, first, blocks, tokens, 30.0, "127.0.0.1:5700"))


def failed(name: str = NAME, reason: Reason = Reason.PEER_LOST, detail: str = "gone") -> Outcome:
    return Outcome(name, False, reason, detail, Mode.PUSH)


LOST = Ended(ROOM, False, "kvx: peer_lost: gone", lost=True)
DONE = Outcome(NAME, True, mode=Mode.PUSH)


def bound() -> tuple[PrefillRooms, FakeInstance, Clock]:
    rooms, instance, clock = prefill()
    rooms.open(ROOM)
    assert rooms.take([offered()]) == [Ready(ROOM, prefix_pages=1)]
    assert instance.events == [Claim(NAME, Mode.PUSH)]
    instance.batches.clear()
    rooms.plan(ROOM, 2)
    return rooms, instance, clock


def send_all(rooms: PrefillRooms) -> list[Any]:
    return rooms.stage(ROOM, 0, [1, 2], last=True, row=2, states=[[0, 1]])


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize("room", [0, 1, 2**63 - 1])
def test_a_name_tells_its_room(room: int) -> None:
    assert room_in(transfer_name(room, 2**63 - 1, 3)) == room


@pytest.mark.parametrize(
    "name", ["", "7", "7.ab", "x.ab.1", "7.zz.1", "-7.ab.1", "7.ab.1\n", " 7.ab.1", "7.ab.1.2", "\u0667.ab.1"]
)
def test_other_names_tell_none(name: str) -> None:
    assert room_in(name) is None


# ---------------------------------------------------------------------------- prefill


def test_chunks_are_staged_at_their_places_and_the_last_brings_the_rest() -> None:
    rooms, instance, _ = bound()
    assert rooms.stage(ROOM, 0, [1], last=False, row=None, states=[[]]) == []
    assert rooms.stage(ROOM, 1, [2], last=True, row=2, states=[[0, 1]]) == []
    first, last = instance.events
    assert first == Stage(NAME, Mode.PUSH, Part(None, (1, 48, 48), BlockTable.of([1], (), ())), False, 48)
    assert last == Stage(NAME, Mode.PUSH, Part(None, (2, 47, 46), BlockTable.of([2], [2], [0, 1])), True, 48)


def test_metadata_never_leaves_before_the_last_chunk() -> None:
    rooms, instance, _ = bound()
    rooms.stage(ROOM, 0, [1], last=False, row=2, states=[[0, 1]])
    (stage,) = instance.events
    assert isinstance(stage, Stage)
    assert stage.part.blocks.groups[1:] == ((), ())


def test_success_is_told_when_kvx_says_so_and_not_before() -> None:
    rooms, _, _ = bound()
    assert send_all(rooms) == []
    assert rooms.take([]) == []
    assert rooms.take([DONE, Released(NAME)]) == [Ended(ROOM, True)]


def test_a_failure_is_told_when_the_pages_are_released() -> None:
    rooms, instance, _ = bound()
    send_all(rooms)
    instance.batches.clear()
    assert rooms.take([failed()]) == []
    assert instance.events == []
    assert rooms.take([Released(NAME)]) == [LOST]


def test_a_failure_in_mid_prefill_ends_the_parts_first() -> None:
    rooms, instance, _ = bound()
    rooms.stage(ROOM, 0, [1], last=False, row=None, states=[[]])
    assert rooms.take([failed()]) == []
    assert instance.events[-1] == Abort(NAME)
    rooms.stage(ROOM, 1, [2], last=True, row=2, states=[[0, 1]])
    assert instance.events[-1] == Abort(NAME), "after an abort nothing is staged"
    assert rooms.take([Released(NAME)]) == [LOST]


def test_a_failure_before_any_part_is_told_at_once() -> None:
    rooms, _, _ = bound()
    assert rooms.take([failed()]) == [LOST]


def test_an_abort_is_told_when_the_pages_are_released() -> None:
    rooms, instance, _ = bound()
    send_all(rooms)
    assert rooms.abort(ROOM, "left") == []
    assert instance.events[-1] == Abort(NAME, Reason.ABORTED, "left")
    assert rooms.abort(ROOM, "left") == []
    assert rooms.take([failed(reason=Reason.ABORTED)]) == []
    assert rooms.take([Released(NAME)]) == [Ended(ROOM, False, "left")]


def test_an_abort_that_crosses_success_is_too_late() -> None:
    rooms, _, _ = bound()
    send_all(rooms)
    assert rooms.abort(ROOM, "left") == []
    assert rooms.take([DONE, Released(NAME)]) == [Ended(ROOM, True)]
    assert rooms.abort(ROOM, "left") == []


def test_an_abort_before_the_offer_refuses_it() -> None:
    rooms, instance, _ = prefill()
    rooms.open(ROOM)
    assert rooms.abort(ROOM, "left") == [Ended(ROOM, False, "left")]
    rooms.take([offered()])
    rooms.close(ROOM)
    rooms.take([offered("7.ab.2")])
    assert instance.events == [Abort(NAME, Reason.ABORTED, "left"), Abort("7.ab.2", Reason.ABORTED, "left")]
    rooms.open(ROOM)
    assert rooms.take([offered("7.ab.3")]) == [Ready(ROOM, 1)], "the room is used again"


def test_an_offer_before_the_request_is_kept_for_it_the_newest_counts() -> None:
    rooms, instance, _ = prefill()
    assert rooms.take([offered(), offered("7.ab.2")]) == []
    assert instance.events == []
    assert rooms.open(ROOM) == [Ready(ROOM, 1)]
    assert instance.events == [Claim("7.ab.2", Mode.PUSH)]


def test_offers_and_refusals_are_swept_by_age() -> None:
    rooms, instance, clock = prefill()
    rooms.take([offered()])
    rooms.open(8)
    rooms.close(8)
    clock.now += 31
    rooms.take([])
    assert rooms.open(ROOM) == []
    rooms.take([offered("8.ab.1")])
    assert instance.events == []


def test_a_failed_room_that_nobody_clears_is_forgotten() -> None:
    rooms, _, clock = bound()
    rooms.take([failed()])
    clock.now += 31
    assert rooms.take([]) == [Forgotten(ROOM)]
    assert rooms.take([]) == []
    assert not rooms.sends


def test_an_empty_offer_is_a_good_bye() -> None:
    rooms, instance, _ = prefill()
    rooms.open(ROOM)
    bye = Grant(NAME, Peer("d", 0), 3, 0, Mode.PUSH, (0, 0, 0), BlockTable.of((), (), ()), 16, 30.0, "127.0.0.1:5700")
    (ended,) = rooms.take([Offered(bye)])
    assert isinstance(ended, Ended)
    assert "gave the request up" in ended.detail
    assert isinstance(instance.events[-1], Abort)


@pytest.mark.parametrize("name", ["elsewhere", "7.zz.1"])
def test_a_transfer_of_somebody_else_is_refused(name: str) -> None:
    rooms, instance, _ = prefill()
    rooms.take([offered(name)])
    assert [(event.transfer, event.reason) for event in instance.events if isinstance(event, Abort)] == [
        (name, Reason.UNKNOWN_TRANSFER)
    ]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"pages": [32]}, "kv: items 32..32"),
        ({"row": 8}, "aux: items 8..8"),
        ({"states": [[0]]}, "items of aux and state: prefill has (1, 1), decode wants (1, 2)"),
        ({"states": [[0, 1, 2]]}, "prefill has (1, 3)"),
        ({"row": None}, "prefill has (0, 2)"),
        ({"states": []}, "0 state components"),
    ],
)
def test_what_does_not_fit_fails_the_room(call: dict[str, Any], says: str) -> None:
    rooms, instance, _ = bound()
    changes = rooms.stage(ROOM, 0, **{"pages": [1, 2], "last": True, "row": 2, "states": [[0, 1]], **call})
    assert isinstance(changes[0], Ended)
    assert says in changes[0].detail
    assert [type(event) for event in instance.events] == [Abort]


def test_a_cleared_request_ends_its_transfer() -> None:
    rooms, instance, _ = bound()
    rooms.stage(ROOM, 0, [1], last=False, row=None, states=[[]])
    rooms.close(ROOM)
    rooms.close(ROOM)
    assert instance.events[1:] == [Abort(NAME)]
    assert rooms.take([failed(), Released(NAME)]) == []


# ----------------------------------------------------------------------------- decode


def decode() -> tuple[DecodeRooms, FakeInstance]:
    instance = FakeInstance(POOLS.layout)
    return DecodeRooms(instance.put, POOLS, epoch=0xAB, lease_s=30.0), instance


def exposed() -> tuple[DecodeRooms, FakeInstance]:
    rooms, instance = decode()
    rooms.expose(ROOM, "127.0.0.1:5700", 1, [9, 3], 6, [[4, 5]])
    grant = offered().grant
    assert instance.events == [Expose(NAME, Mode.PUSH, grant.blocks, grant.first, 48, 30.0, "127.0.0.1:5700")]
    instance.batches.clear()
    return rooms, instance


def test_pages_are_safe_when_both_outcome_and_release_have_come() -> None:
    for news in ([DONE, Released(NAME)], [Released(NAME), DONE], [failed(), Released(NAME)]):
        rooms, _ = exposed()
        assert not rooms.safe(ROOM)
        rooms.take(news[:1])
        assert not rooms.safe(ROOM)
        rooms.take(news[1:])
        assert rooms.safe(ROOM)


def test_success_and_failure_are_told() -> None:
    assert exposed()[0].take([DONE]) == [Ended(ROOM, True)]
    assert exposed()[0].take([failed()]) == [LOST]


def test_an_abort_is_told_to_kvx_once_and_its_end_to_nobody() -> None:
    rooms, instance = exposed()
    rooms.abort(ROOM, "left")
    rooms.close(ROOM, "left")
    assert instance.events == [Abort(NAME, Reason.ABORTED, "left")]
    assert rooms.take([failed(reason=Reason.ABORTED)]) == []
    assert not rooms.safe(ROOM)
    assert rooms.take([Released(NAME)]) == []
    assert rooms.safe(ROOM)


def test_a_second_attempt_has_another_name_and_the_first_one_s_end_is_not_its_own() -> None:
    rooms, instance = exposed()
    rooms.close(ROOM, "again")
    rooms.expose(ROOM, "127.0.0.1:5700", 1, [8], 6, [[4]])
    assert [event.transfer for event in instance.events] == [NAME, "7.ab.2"]
    assert rooms.take([failed(), Released(NAME)]) == []
    assert not rooms.safe(ROOM)
    assert rooms.take([Outcome("7.ab.2", True), Released("7.ab.2")]) == [Ended(ROOM, True)]
    assert rooms.safe(ROOM)


def test_a_good_bye_is_an_empty_grant() -> None:
    rooms, instance = decode()
    rooms.leave(ROOM, "127.0.0.1:5700")
    (expose,) = instance.events
    assert isinstance(expose, Expose)
    assert expose.blocks.empty
    assert rooms.safe(ROOM), "no page was ever open"
    assert rooms.take([failed(), Released(NAME)]) == []
    assert not rooms.receives


def test_items_that_are_not_there_are_not_exposed() -> None:
    rooms, instance = decode()
    with pytest.raises(ValueError, match="kv: items"):
        rooms.expose(ROOM, "127.0.0.1:5700", 0, [32], 6, [[4]])
    assert instance.events == []
