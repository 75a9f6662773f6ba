from __future__ import annotations

from typing import Any

import pytest

from kvx.router.homes import Homes, read_prompt

LONG = list(range(640))
TURNS = [{"role": "user", "content": "What is a block? " * 20}, {"role": "assistant", "content": "A page. " * 40}]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt": LONG}, {"prompt": [*LONG, 1, 2, 3]}),
        ({"prompt": "word " * 400}, {"prompt": "word " * 450}),
        ({"messages": TURNS}, {"messages": [*TURNS, {"role": "user", "content": "And a page?"}]}),
    ],
)
def test_the_next_turn_finds_where_the_last_one_was(first: dict[str, Any], second: dict[str, Any]) -> None:
    homes = Homes()
    homes.keep(read_prompt(first), "http://d1")
    assert homes.find(read_prompt(second)) == "http://d1"


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [9, *LONG]},
        {"prompt": LONG[:64] + [0] * 576},  # a shared beginning that is less than half
        {"prompt": LONG, "model": "another"},
        {"prompt": LONG, "cache_salt": "a tenant"},
        {"prompt": {"no": "prompt"}},
        {},
    ],
)
def test_other_prompts_have_no_home(other: dict[str, Any]) -> None:
    homes = Homes()
    homes.keep(read_prompt({"prompt": LONG}), "http://d1")
    assert homes.find(read_prompt(other)) is None


def test_lengths_are_in_tokens() -> None:
    assert read_prompt({"prompt": LONG}).tokens == 640
    assert read_prompt({"prompt": "x" * 4000}).tokens == 1000
    assert read_prompt({}) == read_prompt({"prompt": None})
