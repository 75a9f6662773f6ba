"""One request, and what a step does with it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from attrs import define, field, frozen

from kvx_reference.engine.cache import block_hash, salt_hash
from kvx_reference.engine.sampling import Drawn, Sampling


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """A connector brings part of its cache."""
    RUNNING = "running"
    FINISHED = "finished"


@define(eq=False)
class Request:
    """A prompt, its output so far, and where its cache stands.

    `params` are the request's transfer parameters, which only a connector understands. `blocks` is
    the block table, `computed` how many of the known tokens have keys and values in it.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(factory=Sampling)
    params: Mapping[str, Any] | None = None
    salt: str = ""
    status: Status = Status.WAITING
    output: list[int] = field(factory=list)
    blocks: list[int] = field(factory=list)
    computed: int = 0
    found: int = 0
    """Tokens that the last placement found in the prefix cache."""
    awaited: int = 0
    """Tokens that will be in the cache when its load is done."""
    random: np.random.Generator = field(init=False)
    _hashes: list[bytes] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.random = np.random.default_rng(self.sampling.seed)
        self._hashes = [salt_hash(self.salt)]

    @property
    def known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """The most tokens it can ever have in the cache: the last one drawn is never computed."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        split = len(self.prompt)
        return [*self.prompt[start:stop], *self.output[max(0, start - split) : max(0, stop - split)]]

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Those of the first `count` blocks, all of which are full of known tokens."""
        for at in range(len(self._hashes) - 1, count):
            tokens = self.tokens(at * block_size, (at + 1) * block_size)
            self._hashes.append(block_hash(self._hashes[-1], tokens))
        return self._hashes[1 : count + 1]


@frozen(eq=False)
class Scheduled:
    """`count` tokens of one request, from position `start` on, that a step computes."""

    request: Request
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class Finish(Enum):
    """Why a request ended; the values are those of the HTTP answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@frozen
class Output:
    """What a step brought for one request: a token, its end, or both. `params` come with the end."""

    request: str
    drawn: Drawn | None = None
    finish: Finish | None = None
    error: str = ""
    params: Mapping[str, Any] | None = None
