"""Scheduling: whatever happens to a request's blocks, its tokens stay the same and no block is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from attrs import evolve

from kvx_reference.engine.engine import Engine, RequestError, Settings
from kvx_reference.engine.model import Model
from kvx_reference.engine.request import Finish, Request, Status
from kvx_reference.engine.sampling import Sampling, draw

Generate = Callable[..., list[list[int]]]
RunOut = Callable[[Engine], Mapping[str, list[int]]]


def greedy(tokens: int = 10) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def test_a_prefix_that_was_computed_before_is_found_and_gives_the_same_tokens(
    model: Model, generate: Generate, prompts: list[list[int]]
) -> None:
    engine = Engine(model, Settings(blocks=200, block_size=4))
    first = generate(prompts, engine=engine)
    before = engine.counters["steps"]
    assert generate(prompts, engine=engine) == first
    request = Request("again", tuple(prompts[-1]), greedy())
    engine.add(request)
    engine.step()
    assert request.found == 56  # of 60: the last block is computed for the logits
    assert engine.counters["steps"] > before
    branched = [*prompts[-1][:30], 3, 4]
    assert generate([branched], engine=Engine(model, Settings(blocks=200, block_size=4))) != [first[-1]]


def test_the_cache_of_known_tokens_can_be_read_in_their_order(
    model: Model, generate: Generate, prompts: list[list[int]]
) -> None:
    """Whatever blocks they are in, and however large those are."""
    prompt = prompts[-1]
    read = {}
    for size in (4, 16):
        engine = Engine(model, Settings(blocks=200, block_size=size))
        assert engine.cached(prompt) == b""
        generate([prompts[0], prompt], engine=engine)
        read[size] = np.frombuffer(engine.cached(prompt), np.float32).reshape(len(prompt) // size * size, -1)
        begins = np.frombuffer(engine.cached([*prompt[:32], 1]), np.float32)
        assert (begins == read[size][:32].ravel()).all()
        assert engine.cached([1, *prompt[1:]]) == b""
    np.testing.assert_allclose(read[4][:48], read[16], atol=1e-5)
    assert np.ptp(read[16], axis=0).max() > 0.1


def test_a_branch_shares_the_blocks_before_it_and_another_salt_shares_none(
    model: Model, generate: Generate, run_out: RunOut, prompts: list[list[int]]
) -> None:
    engine = Engine(model, Settings(blocks=200, block_size=4))
    generate(prompts, engine=engine)
    branched = (*prompts[-1][:30], 3, 4, 5, 6)
    found = {}
    for name, salt in (("shared", ""), ("salted", "tenant")):
        request = Request(name, branched, greedy(), salt=salt)
        engine.add(request)
        tokens = run_out(engine)[name]
        found[name] = request.found, tokens
    assert found["shared"][0] == 28
    assert found["salted"][0] == 0
    assert found["shared"][1] == found["salted"][1]


def test_a_small_pool_preempts_and_gives_the_same_tokens(
    model: Model, generate: Generate, prompts: list[list[int]]
) -> None:
    wanted = [generate([prompt], 30)[0] for prompt in prompts]
    for caching in (True, False):
        engine = Engine(model, Settings(blocks=26, block_size=4, prefix_caching=caching))
        assert generate(prompts, 30, engine=engine) == wanted
        assert engine.scheduler.preemptions > 3


def test_who_was_preempted_does_not_take_the_blocks_back_at_once(model: Model, run_out: RunOut) -> None:
    engine = Engine(model, Settings(blocks=8, block_size=4, step_tokens=4, prefix_caching=False))
    older, younger = (Request(name, (at + 5,) * 15, greedy(12)) for at, name in enumerate(("a", "b")))
    for request in (older, younger):
        engine.add(request)
    while not engine.scheduler.preemptions:
        engine.step()
    assert younger.status is Status.WAITING
    assert (len(older.blocks), younger.blocks) == (5, [])
    assert engine.pool.free == 3
    run_out(engine)
    assert (len(older.output), len(younger.output)) == (12, 12)


def test_a_preempted_request_goes_on_with_its_own_random_numbers(
    model: Model, run_out: RunOut, prompts: list[list[int]]
) -> None:
    def tokens(blocks: int) -> tuple[Mapping[str, list[int]], int]:
        engine = Engine(model, Settings(blocks=blocks, block_size=4))
        for at, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=30, temperature=0.8, top_p=0.9, seed=at, ignore_eos=True)
            engine.add(Request(str(at), tuple(prompt), sampling))
        return run_out(engine), engine.scheduler.preemptions

    (roomy, none), (tight, some) = tokens(200), tokens(26)
    assert roomy == tight
    assert none == 0
    assert some > 3


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_the_blocks_at_once(model: Model, prompts: list[list[int]], steps: int) -> None:
    engine = Engine(model, Settings(blocks=60, block_size=4, step_tokens=20, prefix_caching=False))
    for at, prompt in enumerate(prompts):
        engine.add(Request(str(at), tuple(prompt), greedy(30)))
    for _ in range(steps):
        engine.step()
    for at in range(len(prompts)):
        ended = engine.end(str(at), Finish.ABORT)
        assert ended is not None
        assert ended.finish is Finish.ABORT
    assert engine.end("0", Finish.ABORT) is None
    assert engine.pool.free == engine.pool.total
    assert not engine.has_work
    assert engine.step() == []


def test_others_go_on_after_an_abort(
    model: Model, generate: Generate, run_out: RunOut, prompts: list[list[int]]
) -> None:
    wanted = generate(prompts, 12)
    engine = Engine(model, Settings(blocks=200, block_size=4, step_tokens=20))
    for at, prompt in enumerate(prompts):
        engine.add(Request(str(at), tuple(prompt), greedy(12)))
    got: dict[str, list[int]] = {}
    for step in range(4):
        for output in engine.step():
            got.setdefault(output.request, []).extend([output.drawn.token] if output.drawn else [])
        engine.end(str(2 * step), Finish.ABORT)
    for request, tokens in run_out(engine).items():
        got.setdefault(request, []).extend(tokens)
    assert [got[str(at)] for at in range(1, 10, 2)] == wanted[1::2]


def test_the_end_token_ends_a_text_unless_it_is_ignored(
    model: Model, run_out: RunOut, prompts: list[list[int]]
) -> None:
    engine = Engine(model, Settings(blocks=60, block_size=4))
    engine.add(Request("long", tuple(prompts[3]), greedy(12)))
    (tokens,) = run_out(engine).values()
    engine.model = Model(evolve(model.config, eos=frozenset({tokens[4]})), model._weights)
    engine.add(Request("ends", tuple(prompts[3]), Sampling(max_tokens=12)))
    outputs = [output for _ in range(12) for output in engine.step()]
    assert [output.drawn.token for output in outputs if output.drawn] == tokens[: tokens.index(tokens[4]) + 1]
    assert outputs[-1].finish is Finish.STOP
    engine.add(Request("ignores", tuple(prompts[3]), greedy(12)))
    assert run_out(engine)["ignores"] == tokens


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ((), 1, "empty"),
        ((199,), 1, r"outside of 0\.\.198"),
        ((-1,), 1, "outside"),
        ((5,) * 200, 58, "room for 240"),
        ((5,), 0, "at least 1"),
    ],
)
def test_what_can_never_be_served_is_refused(model: Model, prompt: tuple[int, ...], tokens: int, text: str) -> None:
    engine = Engine(model, Settings(blocks=60, block_size=4))
    with pytest.raises(RequestError, match=text):
        engine.add(Request("r", prompt, Sampling(max_tokens=tokens)))
    assert not engine.has_work


def test_the_longest_request_that_fits_is_served(model: Model, run_out: RunOut) -> None:
    engine = Engine(model, Settings(blocks=10, block_size=4))
    engine.add(Request("r", (5,) * 21, greedy(20)))
    assert len(run_out(engine)["r"]) == 20
    assert engine.pool.free == 10


def test_sampling_follows_the_distribution_and_the_seed() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    random = np.random.default_rng(1)
    counts = np.zeros(4)
    for _ in range(4000):
        counts[draw(logits, Sampling(temperature=1.0), random).token] += 1
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    narrow = {draw(logits, Sampling(temperature=1.0, top_p=0.7), random).token for _ in range(500)}
    assert narrow == {0, 1}
    assert {draw(logits, Sampling(temperature=0.01), random).token for _ in range(50)} == {0}
    drawn = draw(logits, Sampling(logprobs=2), random)
    assert [token for token, _ in drawn.top] == [0, 1]
    np.testing.assert_allclose(np.exp([logprob for _, logprob in drawn.top]), [0.5, 0.3], rtol=1e-5)
