from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from kvx.core.model import Mode
from kvx.driver import RequestInfo
from kvx.router.policy import Busy, Candidate, NoInstance, Reason, View, decide, late, late_gain

REQUEST = RequestInfo("m", 3, 4)
PREFILL = tuple(Candidate(f"http://p{i}", address=f"p{i}:5700") for i in range(3))
DECODE = tuple(Candidate(f"http://d{i}") for i in range(2))
LONG = 100_000


def no_wish(_: RequestInfo) -> None:
    return None


def view(**fields: Any) -> View:
    return View(**{"prefill": PREFILL, "decode": DECODE, "request": REQUEST, "prompt_tokens": LONG, **fields})


def test_in_turn_where_several_are_as_busy() -> None:
    chosen = [decide(view(mode=Mode.PULL, turn=turn), no_wish) for turn in range(12)]
    assert [one.prefill.url[-2:] for one in chosen] == ["p0", "p1", "p2"] * 4
    assert [one.decode.url[-2:] for one in chosen] == ["d0", "d1"] * 6


def test_the_least_busy_one_of_each_pool() -> None:
    busy = [evolve(one, open=open_) for one, open_ in zip(PREFILL, (3, 1, 2), strict=True)]
    decode = [evolve(DECODE[0], open=1), DECODE[1]]
    for turn in range(3):
        chosen = decide(view(prefill=busy, decode=decode, turn=turn), no_wish)
        assert (chosen.prefill, chosen.decode) == (busy[1], decode[1])


def test_who_is_down_or_was_tried_is_left_out() -> None:
    down = Candidate("http://p3", up=False, address="p3:5700", note="connection refused")
    pool = (*PREFILL[:2], down)
    tried = frozenset({"http://p0"})
    chosen = {decide(view(prefill=pool, turn=turn, tried=tried), no_wish).prefill.url for turn in range(6)}
    assert chosen == {"http://p1"}
    with pytest.raises(NoInstance, match=r"no prefill instance .*http://p3: connection refused"):
        decide(view(prefill=pool, tried=frozenset({"http://p0", "http://p1"})), no_wish)


def test_who_has_failed_lately_serves_where_nobody_else_can() -> None:
    resting = evolve(DECODE[0], resting=True)
    chosen = {decide(view(decode=(resting, DECODE[1]), turn=turn), no_wish).decode.url for turn in range(4)}
    assert chosen == {"http://d1"}
    assert decide(view(decode=(resting,)), no_wish).decode is resting


HOME = DECODE[1].url
FULL = [evolve(one, free=0.05) for one in DECODE]
UNKNOWN = [Candidate("http://p9", note="not asked yet")]
QUEUE = [evolve(one, open=4) for one in PREFILL]


@pytest.mark.parametrize(
    ("fields", "mode", "reason"),
    [
        ({"mode": Mode.PULL, "modes": frozenset({Mode.PUSH, Mode.PULL})}, Mode.PULL, Reason.SET),
        ({"modes": frozenset({Mode.PUSH}), "prefill": QUEUE}, Mode.PUSH, Reason.PUSH_ONLY),
        ({"modes": frozenset({Mode.PULL})}, Mode.PULL, Reason.PULL_ONLY),
        ({"prefill": UNKNOWN}, Mode.PULL, Reason.NO_ADDRESS),
        ({"home": HOME, "prefill": QUEUE}, Mode.PUSH, Reason.CONVERSATION),
        ({"decode": FULL, "prompt_tokens": 3}, Mode.PULL, Reason.DECODE_FULL),
        ({"prompt_tokens": 256, "prefill": QUEUE}, Mode.PUSH, Reason.SHORT_PROMPT),
        ({"prompt_tokens": 257, "prefill": QUEUE}, Mode.PULL, Reason.PREFILL_QUEUE),
        ({"prompt_tokens": None, "late_gain": 1.0}, Mode.PULL, Reason.LATE_CHOICE),
        ({"late_gain": 0.9}, Mode.PUSH, Reason.OVERLAP),
    ],
)
def test_the_first_rule_that_applies(fields: dict[str, Any], mode: Mode, reason: Reason) -> None:
    decision = decide(view(**fields), no_wish)
    assert (decision.mode, decision.reason) == (mode, reason)
    assert decision.why


def test_each_reason_has_a_case() -> None:
    (parametrize,) = test_the_first_rule_that_applies.pytestmark  # type: ignore[attr-defined]
    assert {reason for _, _, reason in parametrize.args[1]} == set(Reason) - {Reason.PLUGIN}


def wishing(mode: Mode) -> Callable[[RequestInfo], Mode]:
    return lambda _: mode


def test_a_plugin_decides_before_the_rules_and_after_the_operator() -> None:
    wanted = decide(view(), wishing(Mode.PULL))
    assert (wanted.mode, wanted.reason) == (Mode.PULL, Reason.PLUGIN)
    assert decide(view(mode=Mode.PUSH), wishing(Mode.PULL)).mode is Mode.PUSH
    assert decide(view(modes=frozenset({Mode.PUSH})), wishing(Mode.PULL)).mode is Mode.PUSH
    # what cannot be done is not done: nobody has told where a push would meet
    assert decide(view(prefill=UNKNOWN), wishing(Mode.PUSH)).reason is Reason.NO_ADDRESS


def test_push_needs_a_prefill_instance_with_an_address() -> None:
    unknown = Candidate("http://p9", note="push needs one URL for each of its 2 data-parallel ranks")
    pool = [unknown, PREFILL[0]]
    chosen = {decide(view(prefill=pool, mode=Mode.PUSH, turn=turn), no_wish).prefill for turn in range(4)}
    assert chosen == {PREFILL[0]}
    with pytest.raises(NoInstance, match="one URL for each of its 2"):
        decide(view(prefill=[unknown], mode=Mode.PUSH), no_wish)
    assert decide(view(prefill=[unknown], mode=Mode.PULL), no_wish).prefill is unknown


def test_a_conversation_goes_home_as_long_as_that_makes_nobody_wait() -> None:
    def chosen(open_: int, free: float | None = None) -> str:
        decode = [DECODE[0], evolve(DECODE[1], open=open_, free=free)]
        return decide(view(decode=decode, home=HOME), no_wish).decode.url

    assert chosen(4) == chosen(4, 0.1) == HOME
    assert chosen(5) == chosen(0, 0.09) == DECODE[0].url
    gone = decide(view(decode=[DECODE[0]], home=HOME), no_wish)
    assert (gone.decode, gone.reason) == (DECODE[0], Reason.OVERLAP)


def test_a_full_pool_is_waited_for_and_a_pull_needs_room_at_decode_only_when_prefilled() -> None:
    full = [evolve(one, open=2) for one in DECODE]
    assert decide(view(decode=full, room=2), no_wish).mode is Mode.PULL
    with pytest.raises(Busy, match="all 2 decode instances have 2 open requests"):
        decide(view(decode=full, room=2, mode=Mode.PUSH), no_wish)
    with pytest.raises(Busy, match="decode"):
        late(view(decode=full, room=2))
    with pytest.raises(Busy, match="all 3 prefill instances"):
        decide(view(prefill=[evolve(one, open=2) for one in PREFILL], room=2), no_wish)
    assert late(view(decode=[full[0], DECODE[1]], room=2)) is DECODE[1]


def test_prefilled_prompts_go_before_a_new_push() -> None:
    with pytest.raises(Busy, match="1 prefilled prompts wait"):
        decide(view(mode=Mode.PUSH, waiting=1), no_wish)
    assert decide(view(waiting=1), no_wish).reason is Reason.DECODE_FULL


def test_what_a_late_choice_gains() -> None:
    decode = [evolve(DECODE[0], open=5), evolve(DECODE[1], open=2)]
    assert late_gain(decode, DECODE[0].url, own=1) == 2
    assert late_gain(decode, DECODE[0].url, own=0) == 3
    assert late_gain(decode, DECODE[1].url, own=1) == 0
    assert late_gain(decode, "http://gone", own=1) == 0
