"""The arithmetic against a second one, written plainly, and against itself in pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvx_reference.engine.cache import KvCache
from kvx_reference.engine.model import Chunk, Model

Generate = Callable[..., list[list[int]]]
Logits = NDArray[np.float64]


def naive(model: Model, tokens: list[int]) -> Logits:
    """Logits after each token: no cache, float64, one position and one head after the other."""
    config, weights = model.config, model._weights

    def norm(x: Logits, weight: Logits) -> Logits:
        return np.asarray(x / np.sqrt((x**2).mean() + config.rms_eps) * weight)

    def rotate(head: Logits, position: int) -> Logits:
        out = np.empty_like(head)
        half = config.head_dim // 2
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / config.head_dim)
            a, b = head[i], head[i + half]
            out[i], out[i + half] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return out

    rows = [weights.embedding[token].astype(np.float64) for token in tokens]
    for layer in weights.layers:
        normed = [norm(x, layer.attention_norm) for x in rows]
        q = [(layer.q @ x).reshape(config.heads, -1) for x in normed]
        k = [(layer.k @ x).reshape(config.kv_heads, -1) for x in normed]
        v = [(layer.v @ x).reshape(config.kv_heads, -1) for x in normed]
        for at in range(len(rows)):
            heads = []
            for head in range(config.heads):
                shared = head // (config.heads // config.kv_heads)
                query = rotate(q[at][head], at)
                scores = np.array([query @ rotate(k[i][shared], i) for i in range(at + 1)]) / np.sqrt(config.head_dim)
                share = np.exp(scores - scores.max())
                share /= share.sum()
                heads.append(sum(share[i] * v[i][shared] for i in range(at + 1)))
            rows[at] = rows[at] + layer.o @ np.concatenate(heads)
        for at, x in enumerate(rows):
            inner = norm(x, layer.mlp_norm)
            gate = layer.gate @ inner
            rows[at] = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ inner))
    return np.stack([weights.head @ norm(x, weights.norm) for x in rows])


def test_logits_are_those_of_a_plain_forward(model: Model, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        cache = KvCache(model.config, 16, 4)
        got = model.forward([Chunk(prompt, 0, range(16))], cache)[0]
        np.testing.assert_allclose(got, naive(model, prompt)[-1], rtol=0, atol=2e-4)


def test_where_blocks_lie_and_how_a_prompt_is_cut_changes_nothing(model: Model, prompts: list[list[int]]) -> None:
    (prompt,) = [prompt for prompt in prompts if len(prompt) == 31]
    wanted = naive(model, prompt)
    scattered = KvCache(model.config, 16, 4)
    blocks = [9, 3, 15, 0, 7, 12, 1, 4]
    for start, stop in [(0, 1), (1, 7), (7, 8), (8, 20), (20, 31)]:
        got = model.forward([Chunk(prompt[start:stop], start, blocks)], scattered)[0]
        np.testing.assert_allclose(got, wanted[stop - 1], rtol=0, atol=2e-4)


def test_a_mixed_batch_is_the_same_as_one_after_the_other(model: Model, prompts: list[list[int]]) -> None:
    cache = KvCache(model.config, 64, 4)
    tables = [list(range(16 * at, 16 * at + 16)) for at in range(4)]
    chosen = [prompts[at] for at in (3, 5, 7, 8)]
    for prompt, table in zip(chosen[:3], tables, strict=False):
        model.forward([Chunk(prompt[:-1], 0, table)], cache)
    chunks = [Chunk(p[-1:], len(p) - 1, t) for p, t in zip(chosen[:3], tables, strict=False)]
    # Three that decode around one that prefills.
    got = model.forward([*chunks[:1], Chunk(chosen[3], 0, tables[3]), *chunks[1:]], cache)
    for at, prompt in enumerate([chosen[0], chosen[3], chosen[1], chosen[2]]):
        np.testing.assert_allclose(got[at], naive(model, prompt)[-1], rtol=0, atol=2e-4)


def test_another_cache_gives_other_logits(model: Model, prompts: list[list[int]]) -> None:
    prompt = prompts[-1]
    cache = KvCache(model.config, 16, 4)
    before = model.forward([Chunk(prompt[:-1], 0, range(16))], cache)
    assert np.isfinite(before).all()
    right = model.forward([Chunk(prompt[-1:], len(prompt) - 1, range(16))], cache)[0]
    cache.array[:, 3:5] = 0
    wrong = model.forward([Chunk(prompt[-1:], len(prompt) - 1, range(16))], cache)[0]
    assert np.abs(right - wrong).max() > 0.01


def test_another_sequences_poison_does_not_spread(model: Model, prompts: list[list[int]]) -> None:
    """Padding of a shorter sequence must not read what anyone else has written."""
    cache = KvCache(model.config, 32, 4)
    short, long = prompts[1], prompts[8]
    for prompt, table in ((short, [10]), (long, list(range(11, 20)))):
        model.forward([Chunk(prompt[:-1], 0, table)], cache)
    cache.array[:, [0, 1, 2, 30, 31]] = np.nan
    chunks = [Chunk(short[-1:], len(short) - 1, [10]), Chunk(long[-1:], len(long) - 1, list(range(11, 20)))]
    assert np.isfinite(model.forward(chunks, cache)).all()


def test_layers_are_told_in_order_when_their_keys_stand_in_the_cache(model: Model, prompts: list[list[int]]) -> None:
    prompt = prompts[5]
    cache, whole = KvCache(model.config, 8, 4), KvCache(model.config, 8, 4)
    model.forward([Chunk(prompt, 0, range(8))], whole)
    told = []

    def look(layer: int) -> None:
        told.append(layer)
        assert np.array_equal(cache.array[: layer + 1], whole.array[: layer + 1])
        assert not cache.array[layer + 1 :].any()

    model.forward([Chunk(prompt, 0, range(8))], cache, look)
    assert told == [0, 1, 2]
    assert whole.array.any(axis=(1, 2, 3, 4)).all()


@pytest.mark.parametrize("sizes", [{"step_tokens": 7}, {"step_tokens": 1}, {"block_size": 16}, {"max_running": 1}])
def test_tokens_do_not_depend_on_how_work_is_cut(generate: Generate, prompts: list[list[int]], sizes: dict) -> None:
    single = [generate([prompt])[0] for prompt in prompts]
    assert generate(prompts, **sizes) == single
    assert len({tuple(tokens) for tokens in single}) == len(prompts)
