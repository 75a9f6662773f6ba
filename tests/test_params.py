from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.core.errors import RemoteProtocolError
from kvx.core.model import BlockTable, Grant, Mode, Peer, Reason, Ticket
from kvx.params import Consume, Fault, Produce, Wish, offer, prompt_digest, read_params

GRANT = Grant("t1", Peer("p", 0), 7, 0, Mode.PULL, (0,), BlockTable.of([1]), 5, 30.0, "127.0.0.1:5700")
TICKET = Ticket(GRANT, "", b"")


def read_ticket(text: str) -> Ticket:
    if text == "good":
        return TICKET
    raise RemoteProtocolError("the ticket is forged")


def read(params: object, mode: str = "auto", *, dial: bool = True) -> Wish:
    return read_params(params, mode, read_ticket, lambda _: dial)


UPSTREAM = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def test_upstreams_own_keys_ask_for_a_pull() -> None:
    assert read({"do_remote_decode": True, "do_remote_prefill": False, **UPSTREAM}) == Wish(Produce(Mode.PULL))


def test_a_ticket_is_a_pull() -> None:
    wish = read({"do_remote_prefill": True, "do_remote_decode": False, "kvx": {"ticket": "good"}})
    assert wish == Wish(consume=Consume(Mode.PULL, "t1", ticket=TICKET))


def test_push_legs() -> None:
    kvx = {"mode": "push", "transfer": "x"}
    assert read({"do_remote_decode": True, "kvx": kvx}) == Wish(Produce(Mode.PUSH, "x"))
    consumer = read({"do_remote_prefill": True, "kvx": {**kvx, "from": "[::1]:5700"}})
    assert consumer == Wish(consume=Consume(Mode.PUSH, "x", address="[::1]:5700"))


def test_a_consumer_of_this_turn_may_be_the_producer_of_the_next() -> None:
    kvx = {"mode": "push", "transfer": "x", "from": "127.0.0.1:1"}
    wish = read({"do_remote_prefill": True, "do_remote_decode": True, "kvx": kvx})
    assert wish == Wish(Produce(Mode.PULL), Consume(Mode.PUSH, "x", address="127.0.0.1:1"))


def test_what_is_handed_on_may_be_a_push_too() -> None:
    following = {"mode": "push", "transfer": "y"}
    for taken in ({"ticket": "good"}, {"mode": "push", "transfer": "x", "from": "127.0.0.1:1"}):
        params = {"do_remote_prefill": True, "do_remote_decode": True}
        assert read({**params, "kvx": taken}).produce == Produce(Mode.PULL)
        assert read({**params, "kvx": {**taken, "next": following}}).produce == Produce(Mode.PUSH, "y")
        assert isinstance(read({**params, "kvx": {**taken, "next": "push"}}).produce, Fault)


def test_a_push_may_bring_a_part_of_the_prompt() -> None:
    kvx = {"mode": "push", "transfer": "x", "from": "127.0.0.1:1"}
    wish = read({"do_remote_prefill": True, "kvx": {**kvx, "tokens": 140}})
    assert wish.consume == Consume(Mode.PUSH, "x", address="127.0.0.1:1", tokens=140)
    for wrong in (0, -1, True, "7", 1.5):
        assert isinstance(read({"do_remote_prefill": True, "kvx": {**kvx, "tokens": wrong}}).consume, Fault)


def test_an_offer_names_the_prompt_it_was_made_for() -> None:
    answer = offer("good", prompt_digest([5, 6]))
    assert read(answer).consume == Consume(Mode.PULL, "t1", ticket=TICKET, prompt=prompt_digest((5, 6)))
    assert prompt_digest([5, 6]) != prompt_digest([6, 5])
    assert isinstance(read({**answer, "kvx": {"ticket": "good", "prompt": 5}}).consume, Fault)


def test_probe_and_nothing() -> None:
    assert read({"kvx": {"probe": True}}) == Wish(probe=True)
    for nothing in (None, {}, {"kvx": None}, {"do_remote_prefill": False}, 3, "x"):
        assert read(nothing) == Wish()


@pytest.mark.parametrize(
    ("kvx", "reason", "word"),
    [
        (None, Reason.UNKNOWN_TRANSFER, "no kvx ticket"),
        ({"ticket": 3}, Reason.UNKNOWN_TRANSFER, "no kvx ticket"),
        ({"ticket": "bad"}, Reason.AUTH, "forged"),
        (["x"], Reason.OTHER, "not an object"),
        ({"mode": "teleport"}, Reason.OTHER, "not push or pull"),
        ({"mode": "push"}, Reason.OTHER, "kvx.transfer"),
        ({"mode": "push", "transfer": "x" * 129, "from": "127.0.0.1:1"}, Reason.OTHER, "kvx.transfer"),
        ({"mode": "push", "transfer": "x\n", "from": "127.0.0.1:1"}, Reason.OTHER, "kvx.transfer"),
        ({"mode": "push", "transfer": "x"}, Reason.OTHER, "kvx.from"),
        ({"mode": "push", "transfer": "x", "from": "nowhere"}, Reason.OTHER, "kvx.from"),
    ],
)
def test_a_consumers_fault_has_a_reason(kvx: object, reason: Reason, word: str) -> None:
    fault = read({"do_remote_prefill": True, "kvx": kvx}).consume
    assert isinstance(fault, Fault)
    assert fault.reason is reason
    assert word in fault.detail


def test_addresses_that_may_not_be_dialled() -> None:
    push = read({"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": "x", "from": "10.0.0.1:1"}}, dial=False)
    pull = read({"do_remote_prefill": True, "kvx": {"ticket": "good"}}, dial=False)
    for fault in (push.consume, pull.consume):
        assert isinstance(fault, Fault)
        assert fault.reason is Reason.AUTH


@pytest.mark.parametrize("allowed", ["push", "pull"])
def test_option_mode_refuses_the_other(allowed: str) -> None:
    push = read({"do_remote_decode": True, "kvx": {"mode": "push", "transfer": "x"}}, allowed).produce
    pull = read({"do_remote_decode": True}, allowed).produce
    assert isinstance(push, Fault) == (allowed == "pull")
    assert isinstance(pull, Fault) == (allowed == "push")


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["mode", "transfer", "from", "ticket", "probe"])


@given(
    st.dictionaries(st.sampled_from(["do_remote_decode", "do_remote_prefill"]), json),
    json | st.dictionaries(keys, json),
)
def test_whatever_a_client_writes_never_raises(flags: dict[str, Any], kvx: object) -> None:
    assert isinstance(read({**flags, "kvx": kvx}), Wish)
