"""One completion becomes two legs, and what comes back is checked."""

from __future__ import annotations

from typing import Any

import pytest

from kvx.core.errors import KvxError, RemoteProtocolError
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.driver import Probe
from kvx.params import Produce, read_params

DIALECT = CompletionsDialect()
BODY = {"model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
TOLD = {"instance": "i", "epoch": 7, "addresses": ["127.0.0.1:1"], "dp_rank": 0, "dp_size": 1, "fingerprint": "f"}


def answer(**kvx: Any) -> dict[str, Any]:
    return {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "kvx": kvx}}


@pytest.mark.parametrize("mode", Mode)
def test_the_prefill_leg_computes_one_token_and_is_not_streamed(mode: Mode) -> None:
    leg = DIALECT.prefill_leg({**BODY, "min_tokens": 4, "max_completion_tokens": 9, "n": 3, "best_of": 3}, mode, "t")
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["min_tokens"], leg["stream"]) == (1, 1, 1, False)
    assert leg["n"] == 1
    assert not {"stream_options", "best_of"} & set(leg)
    assert leg["prompt"] == BODY["prompt"]
    wish = read_params(leg["kv_transfer_params"], "auto", pytest.fail, lambda _: True)
    assert wish.produce == Produce(mode, "t" if mode is Mode.PUSH else "")
    assert "kv_transfer_params" not in BODY


def test_the_decode_leg_is_the_body_with_what_belongs_to_it() -> None:
    pulled = DIALECT.decode_leg(BODY, Mode.PULL, "", prefill_answer=answer(ticket="T"))
    assert pulled == {**BODY, "kv_transfer_params": {"do_remote_prefill": True, "kvx": {"ticket": "T"}}}
    pushed = DIALECT.decode_leg(BODY, Mode.PUSH, "t", prefill_address="h:1")
    kvx = {"mode": "push", "transfer": "t", "from": "h:1"}
    assert pushed["kv_transfer_params"] == {"do_remote_prefill": True, "do_remote_decode": False, "kvx": kvx}


def test_a_decode_leg_without_what_it_needs_is_refused() -> None:
    with pytest.raises(KvxError, match="no kv_transfer_params"):
        DIALECT.decode_leg(BODY, Mode.PULL, "", prefill_answer={"choices": []})
    with pytest.raises(KvxError, match="control address"):
        DIALECT.decode_leg(BODY, Mode.PUSH, "t")


def test_the_ticket_of_an_answer() -> None:
    assert DIALECT.ticket(answer(ticket="T")) == "T"
    for other in ({}, answer(), answer(ticket=3), {"kv_transfer_params": None}, {"kv_transfer_params": {"kvx": []}}):
        assert DIALECT.ticket(other) is None


def test_a_probe_is_read() -> None:
    assert DIALECT.read_probe(answer(**TOLD)) == Probe("i", 7, ("127.0.0.1:1",), 0, 1, "f")
    assert DIALECT.probe_request("m")["max_tokens"] == 1


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("value", [None, True, 1.5, [3], {"a": 1}])
def test_a_probe_of_wrong_types_is_refused(name: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="wrong types"):
        DIALECT.read_probe(answer(**{**TOLD, name: value}))


@pytest.mark.parametrize("name", TOLD)
def test_a_probe_that_lacks_something_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        DIALECT.read_probe(answer(**{key: value for key, value in TOLD.items() if key != name}))


def test_addresses_are_a_list_and_not_a_text() -> None:
    with pytest.raises(RemoteProtocolError, match="wrong types"):
        DIALECT.read_probe(answer(**{**TOLD, "addresses": "127.0.0.1:1"}))
