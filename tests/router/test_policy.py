from __future__ import annotations

import pytest

from kvx.core.model import Mode
from kvx.driver import RequestInfo
from kvx.router.policy import Candidate, NoInstance, Pools, State, choose

REQUEST = RequestInfo("m", 3, 4)
PREFILL = tuple(Candidate(f"http://p{i}", address=f"p{i}:5700") for i in range(3))
DECODE = tuple(Candidate(f"http://d{i}") for i in range(2))


def no_wish(_: RequestInfo) -> None:
    return None


def test_round_robin_in_each_pool() -> None:
    pools = Pools(PREFILL, DECODE, Mode.PULL)
    chosen = [choose(pools, REQUEST, State(turn), no_wish) for turn in range(12)]
    assert [one.prefill.url[-2:] for one in chosen] == ["p0", "p1", "p2"] * 4
    assert [one.decode.url[-2:] for one in chosen] == ["d0", "d1"] * 6


def test_who_is_down_or_was_tried_is_left_out() -> None:
    down = Candidate("http://p3", up=False, address="p3:5700", note="connection refused")
    pools = Pools((*PREFILL[:2], down), DECODE, Mode.PUSH)
    chosen = {choose(pools, REQUEST, State(turn, frozenset({"http://p0"})), no_wish).prefill.url for turn in range(6)}
    assert chosen == {"http://p1"}
    with pytest.raises(NoInstance, match=r"no prefill instance .*http://p3: connection refused"):
        choose(pools, REQUEST, State(0, frozenset({"http://p0", "http://p1"})), no_wish)


@pytest.mark.parametrize(
    ("mode", "wish", "address", "expected"),
    [
        (Mode.PULL, Mode.PUSH, "p:1", Mode.PULL),  # the operator decides
        (Mode.PUSH, Mode.PULL, "p:1", Mode.PUSH),
        (None, Mode.PULL, "p:1", Mode.PULL),  # then a plugin
        (None, Mode.PUSH, "p:1", Mode.PUSH),
        (None, None, "p:1", Mode.PUSH),  # then what can be done
        (None, None, None, Mode.PULL),
    ],
)
def test_who_decides_on_the_mode(mode: Mode | None, wish: Mode | None, address: str | None, expected: Mode) -> None:
    pools = Pools([Candidate("http://p", address=address)], DECODE, mode)
    seen: list[RequestInfo] = []

    def ask(request: RequestInfo) -> Mode | None:
        seen.append(request)
        return wish

    assert choose(pools, REQUEST, State(), ask).mode is expected
    assert seen == ([] if mode else [REQUEST])


def test_push_needs_a_prefill_instance_with_an_address() -> None:
    unknown = Candidate("http://p9", note="push needs one URL for each of its 2 data-parallel ranks")
    pools = Pools([unknown, PREFILL[0]], DECODE, Mode.PUSH)
    assert {choose(pools, REQUEST, State(turn), no_wish).prefill for turn in range(4)} == {PREFILL[0]}
    with pytest.raises(NoInstance, match="one URL for each of its 2"):
        choose(Pools([unknown], DECODE, Mode.PUSH), REQUEST, State(), no_wish)
    assert choose(Pools([unknown], DECODE, Mode.PULL), REQUEST, State(), no_wish).prefill is unknown
