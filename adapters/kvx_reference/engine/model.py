"""The arithmetic: RMSNorm, rotary embedding, grouped-query attention over a paged cache, SwiGLU; float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvx_reference.engine.cache import KvCache
from kvx_reference.engine.config import ModelConfig
from kvx_reference.engine.weights import LayerWeights, Weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
OnLayer = Callable[[int], None]
"""Called with the layer's index as soon as its keys and values of the step stand in the cache."""


@frozen
class Chunk:
    """Tokens of one sequence at the positions from `start` on; `blocks` is its block table."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


@frozen(eq=False)
class _Group:
    """Chunks of one length, computed together: rows of the step, and slots of their whole context.

    `rows` is [chunk][token], `slots` [chunk][position], padded; `masked` [chunk][token][position]
    says what a token must not see.
    """

    rows: Ints
    slots: Ints
    masked: NDArray[np.bool_]


class Model:
    """One model, ready to compute."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        frequency = np.float32(1.0) / np.float32(config.rope_theta) ** half
        angle = np.arange(config.max_position, dtype=np.float32)[:, None] * frequency
        self._cos, self._sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

    def forward(self, chunks: Sequence[Chunk], cache: KvCache, on_layer: OnLayer | None = None) -> Floats:
        """Compute the chunks in one pass; the logits after each chunk's last token, [chunk][token]."""
        tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([_positions(chunk) for chunk in chunks])
        slots = np.concatenate([_slots(chunk, cache.block_size)[chunk.start :] for chunk in chunks])
        groups = _group(chunks, cache.block_size)
        cos, sin = self._cos[positions], self._sin[positions]
        x: Floats = self._weights.embedding[tokens]
        for index, layer in enumerate(self._weights.layers):
            normed = _norm(x, layer.attention_norm, self.config.rms_eps)
            q, k, v = self._project(normed, layer)
            cache.write(index, slots, _rotate(k, cos, sin), v)
            if on_layer is not None:
                on_layer(index)
            seen = np.empty((len(tokens), self.config.heads * self.config.head_dim), dtype=np.float32)
            q = _rotate(q, cos, sin)
            for group in groups:
                seen[group.rows] = self._attend(q[group.rows], cache.read(index, group.slots), group.masked)
            x += seen @ layer.o.T
            normed = _norm(x, layer.mlp_norm, self.config.rms_eps)
            x += (_silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1
        logits: Floats = _norm(x[ends], self._weights.norm, self.config.rms_eps) @ self._weights.head.T
        return logits

    def _project(self, x: Floats, layer: LayerWeights) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values, [row][head][dim]."""
        dim = self.config.head_dim
        return (
            (x @ layer.q.T).reshape(len(x), -1, dim),
            (x @ layer.k.T).reshape(len(x), -1, dim),
            (x @ layer.v.T).reshape(len(x), -1, dim),
        )

    def _attend(self, q: Floats, kv: Floats, masked: NDArray[np.bool_]) -> Floats:
        """q [chunk][token][head][dim], kv [chunk][position][kv head][key, value] -> [chunk][token][head * dim]."""
        chunks, tokens, heads, dim = q.shape
        kv_heads = kv.shape[2]
        shared = heads // kv_heads
        # Queries of the heads that share a key-value head stand together: [chunk][kv head][shared * token][dim].
        q = q.reshape(chunks, tokens, kv_heads, shared, dim).transpose(0, 2, 3, 1, 4)
        q = q.reshape(chunks, kv_heads, shared * tokens, dim)
        kv = kv.transpose(0, 2, 1, 3)
        scores = q @ kv[..., :dim].swapaxes(-1, -2) * np.float32(dim**-0.5)
        scores = scores.reshape(chunks, kv_heads, shared, tokens, -1)
        np.copyto(scores, -np.inf, where=masked[:, None, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(chunks, kv_heads, shared * tokens, -1) @ kv[..., dim:]
        out = out.reshape(chunks, kv_heads, shared, tokens, dim).transpose(0, 3, 1, 2, 4)
        return np.asarray(out.reshape(chunks, tokens, heads * dim), dtype=np.float32)


def _positions(chunk: Chunk) -> Ints:
    return np.arange(chunk.start, chunk.start + len(chunk.tokens))


def _slots(chunk: Chunk, block_size: int) -> Ints:
    """Where each position up to the chunk's last one lies in the cache."""
    every = np.arange(chunk.start + len(chunk.tokens))
    return np.asarray(chunk.blocks, dtype=np.int64)[every // block_size] * block_size + every % block_size


def _group(chunks: Sequence[Chunk], block_size: int) -> list[_Group]:
    """Decoding sequences, of one token each, are one group; longer chunks stand alone."""
    ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
    rows = [np.arange(end - len(chunk.tokens), end) for chunk, end in zip(chunks, ends, strict=True)]
    decoding = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
    together = [[index] for index, chunk in enumerate(chunks) if len(chunk.tokens) > 1]
    if decoding:
        together.append(decoding)
    groups = []
    for members in together:
        contexts = [_slots(chunks[index], block_size) for index in members]
        longest = max(map(len, contexts))
        # Padded with slots of its own: zero times another sequence's NaN would be NaN.
        slots = np.stack([np.pad(context, (0, longest - len(context)), mode="edge") for context in contexts])
        positions = np.stack([_positions(chunks[index]) for index in members])
        masked = np.arange(longest) > positions[..., None]
        groups.append(_Group(np.stack([rows[index] for index in members]), slots, masked))
    return groups


def _norm(x: Floats, weight: Floats, eps: float) -> Floats:
    scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps))
    return np.asarray(x * scale * weight, dtype=np.float32)


def _silu(x: Floats) -> Floats:
    # tanh does not overflow where exp would.
    return np.asarray(x * (0.5 * (1.0 + np.tanh(0.5 * x))), dtype=np.float32)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Hugging Face's layout: the first half of a head's numbers is paired with the second one."""
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)
