"""A model so small that numpy computes it at once, and an engine that runs until it has nothing to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvx_reference.engine.config import ModelConfig
from kvx_reference.engine.engine import Engine, Settings, random_model
from kvx_reference.engine.model import Model
from kvx_reference.engine.request import Request
from kvx_reference.engine.sampling import Sampling

SMALL = ModelConfig(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    max_position=256,
)


@pytest.fixture(scope="session")
def model() -> Model:
    return random_model(SMALL, 7)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    draw = random.Random(5)  # noqa: S311
    return [[draw.randrange(3, 199) for _ in range(n)] for n in (1, 3, 4, 5, 8, 13, 16, 17, 31, 60)]


def finish(engine: Engine, *, limit: int = 2000) -> dict[str, list[int]]:
    """Step until nothing is left to do; the tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not (engine.has_work or engine.is_waiting):
            return tokens
        for output in engine.step():
            tokens.setdefault(output.request, []).extend([output.drawn.token] if output.drawn else [])
    raise AssertionError(f"the engine still has work after {limit} steps")


@pytest.fixture
def generate(model: Model) -> Callable[..., list[list[int]]]:
    """Tokens of each prompt from one engine that has them all at once; every block is free afterwards."""

    def run(prompts: list[list[int]], tokens: int = 10, engine: Engine | None = None, **sizes: Any) -> list[list[int]]:
        engine = engine or Engine(model, Settings(**{"blocks": 200, "block_size": 4, **sizes}))
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        for at, prompt in enumerate(prompts):
            engine.add(Request(str(at), tuple(prompt), sampling))
        got = finish(engine)
        assert engine.pool.free == engine.pool.total
        assert not engine.pool.in_use()
        return [got[str(at)] for at in range(len(prompts))]

    return run


@pytest.fixture
def run_out() -> Callable[[Engine], Mapping[str, list[int]]]:
    return finish
