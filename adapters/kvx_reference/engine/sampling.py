"""Which token comes next."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@frozen
class Sampling:
    """How a request wants its tokens. Temperature 0 takes the likeliest one; `logprobs` None: none are reported."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None


@frozen
class Drawn:
    """A token, its log-probability, and those of the likeliest ones, where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def draw(logits: Floats, sampling: Sampling, random: np.random.Generator) -> Drawn:
    """One token from the logits of one position."""
    if sampling.temperature == 0:
        token = int(np.argmax(logits))
    else:
        token = _draw(logits / np.float32(sampling.temperature), sampling.top_p, random)
    if sampling.logprobs is None:
        return Drawn(token)
    shifted = (logits - logits.max()).astype(np.float64)
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logits, kind="stable")[: sampling.logprobs]
    return Drawn(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in best))


def _draw(logits: Floats, top_p: float, random: np.random.Generator) -> int:
    """From the fewest likeliest tokens that have `top_p` of the probability together."""
    order = np.argsort(-logits, kind="stable")
    summed = np.cumsum(_softmax(logits)[order], dtype=np.float64)
    count = int(np.searchsorted(summed, top_p * summed[-1])) + 1
    reached = summed[: min(count, len(summed))]
    at = int(np.searchsorted(reached, random.random() * reached[-1], side="right"))
    return int(order[min(at, len(reached) - 1)])


def _softmax(logits: Floats) -> NDArray[np.float64]:
    exp = np.exp((logits - logits.max()).astype(np.float64))
    return np.asarray(exp / exp.sum())
