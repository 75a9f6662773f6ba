"""Whatever a client sends is a request or one sentence; pieces of text add up to the text."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvx_reference.engine.completions import TextStream, Wanted, parse
from kvx_reference.engine.engine import RequestError
from kvx_reference.engine.tokenizer import WordTokenizer, vocabulary

TOKENIZER = WordTokenizer(vocabulary(60))
KEYS = [
    *("prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "logprobs", "n"),
    *("ignore_eos", "return_token_ids", "cache_salt", "kv_transfer_params", "echo", "logit_bias", "top_k"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES) | VALUES)
def test_any_body_is_a_request_or_a_sentence(body: Any) -> None:
    with contextlib.suppress(RequestError):
        wanted = parse(body, TOKENIZER)
        assert isinstance(wanted, Wanted)
        assert wanted.sampling.max_tokens >= 1
        assert 0 <= wanted.sampling.temperature <= 10
        assert all(type(token) is int for token in wanted.prompt)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 59), max_size=12),
    st.lists(st.sampled_from(["w5", "w5 w6", "w1", " ", "w55 w", "6 w"]), max_size=2),
)
def test_pieces_add_up_to_the_text_before_the_first_stop(tokens: list[int], stops: list[str]) -> None:
    stream = TextStream(TOKENIZER, tuple(stops))
    got = ""
    for token in tokens:
        got += stream.add(token)
        if stream.stopped:
            break
    got += stream.end()
    text = TOKENIZER.decode(tokens)
    begins = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert stream.stopped == bool(begins)
    assert len(got) <= len(text)
    if not begins:
        assert got == text
    else:
        # Tokens come one by one: of two stop texts the one that is complete first counts.
        assert text.startswith(got)
        assert not any(stop in got for stop in stops)
