"""The bodies of `/v1/completions`: what is taken from a request, and how answers look. OpenAI's form, n = 1.

Beyond it, as in vLLM: `prompt` may be token ids, `ignore_eos`, `return_token_ids`, `cache_salt`
and `kv_transfer_params`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from kvx_reference.engine.engine import RequestError
from kvx_reference.engine.request import Finish
from kvx_reference.engine.sampling import Drawn, Sampling
from kvx_reference.engine.tokenizer import Tokenizer

_MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 4
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
}
"""Keys that would change the tokens and are not supported: the values that change nothing."""


@frozen
class Wanted:
    """A checked request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    token_ids: bool
    salt: str
    params: Mapping[str, Any] | None


def parse(body: object, tokenizer: Tokenizer) -> Wanted:
    """Raises RequestError for what cannot be served, with the key it stands under."""
    if not isinstance(body, Mapping):
        raise RequestError("the body is no JSON object")
    for key, neutral in _NEUTRAL.items():
        if body.get(key) is not None and body[key] not in neutral:
            raise RequestError(f"{key} is not supported")
    options = body.get("stream_options") or {}
    params = body.get("kv_transfer_params")
    if not isinstance(options, Mapping):
        raise RequestError("stream_options has to be an object")
    if params is not None and not isinstance(params, Mapping):
        raise RequestError("kv_transfer_params has to be an object")
    logprobs = _integer(body, "logprobs", None, 0, _MAX_TOP_LOGPROBS)
    sampling = Sampling(
        max_tokens=_integer(body, "max_tokens", 16, 1, 1 << 20) or 16,
        temperature=_number(body, "temperature", 1.0, 0.0, 10.0),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1.0),
        seed=_integer(body, "seed", None, 0, (1 << 63) - 1),
        ignore_eos=_flag(body, "ignore_eos"),
        logprobs=logprobs,
    )
    return Wanted(
        prompt=_prompt(body.get("prompt"), tokenizer),
        sampling=sampling,
        stops=_stops(body.get("stop")),
        stream=_flag(body, "stream"),
        usage=options.get("include_usage") is True,
        token_ids=_flag(body, "return_token_ids"),
        salt=_text(body, "cache_salt"),
        params=params,
    )


def _prompt(value: object, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return tuple(tokenizer.encode(value))
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    raise RequestError("prompt has to be one text or one list of token ids")


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop has to be a text or a list of at most {_MAX_STOPS} texts")
    return tuple(stops)


def _integer(body: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{key} has to be an integer from {low} to {high}")
    return value


def _number(body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{key} has to be a number")
    if not low <= value <= high:
        raise RequestError(f"{key} has to be from {low:g} to {high:g}")
    return float(value)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{key} has to be true or false")
    return bool(value)


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{key} has to be a text")
    return value or ""


@define
class TextStream:
    """Turns tokens into pieces of text, and notices where a stop text begins.

    Text that may still become another character or a stop text is held back.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    _tokens: list[int] = field(factory=list)
    _sent: int = 0
    _text: str = ""
    stopped: bool = False

    def add(self, token: int) -> str:
        self._tokens.append(token)
        self._text = self.tokenizer.decode(self._tokens)
        begins = [at for stop in self.stops if (at := self._text.find(stop)) >= 0]
        if begins:
            self.stopped = True
            self._text = self._text[: min(begins)]
            return self._take(len(self._text))
        settled = len(self._text.rstrip("\ufffd"))
        return self._take(settled - max((self._begun(stop, settled) for stop in self.stops), default=0))

    def end(self) -> str:
        """The rest, when no further token comes."""
        return self._take(len(self._text))

    def _begun(self, stop: str, settled: int) -> int:
        """How many of the last characters are the beginning of a stop text."""
        text = self._text[:settled]
        return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)

    def _take(self, until: int) -> str:
        piece = self._text[self._sent : until]
        self._sent = max(self._sent, until)
        return piece


@frozen
class Piece:
    """News of a request for its client: text and tokens, and with the last one why it ended."""

    text: str = ""
    drawn: tuple[Drawn, ...] = ()
    finish: Finish | None = None
    error: str = ""
    params: Mapping[str, Any] | None = None


@define
class Answers:
    """Writes the answer to one request, whole or as a stream."""

    id: str
    model: str
    created: int
    wanted: Wanted
    tokenizer: Tokenizer
    _counted: int = 0

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """One event of a stream. vLLM tells the prompt's tokens with the first one."""
        self._counted += len(piece.drawn)
        choice = self._choice(piece)
        if self.wanted.token_ids:
            choice["prompt_token_ids"] = list(self.wanted.prompt) if first else None
        return self._frame([choice], piece)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        last = pieces[-1]
        drawn = tuple(drawn for piece in pieces for drawn in piece.drawn)
        self._counted = len(drawn)
        piece = Piece("".join(piece.text for piece in pieces), drawn, last.finish, last.error, last.params)
        choice = self._choice(piece)
        if self.wanted.token_ids:
            choice["prompt_token_ids"] = list(self.wanted.prompt)
        return {**self._frame([choice], piece), "usage": self._usage()}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._frame([], Piece()), "usage": self._usage()}

    def _frame(self, choices: list[dict[str, Any]], piece: Piece) -> dict[str, Any]:
        frame: dict[str, Any] = {"id": self.id, "object": "text_completion", "created": self.created}
        frame |= {"model": self.model, "choices": choices}
        return frame if piece.params is None else {**frame, "kv_transfer_params": dict(piece.params)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": piece.text, "logprobs": self._logprobs(piece.drawn)}
        choice["finish_reason"] = None if piece.finish is None else piece.finish.value
        if self.wanted.token_ids:
            choice["token_ids"] = [drawn.token for drawn in piece.drawn]
        return choice

    def _logprobs(self, drawn: Sequence[Drawn]) -> dict[str, Any] | None:
        if self.wanted.sampling.logprobs is None:
            return None
        return {
            "tokens": [self.tokenizer.decode([each.token]) for each in drawn],
            "token_logprobs": [each.logprob for each in drawn],
            "top_logprobs": [
                {self.tokenizer.decode([token]): logprob for token, logprob in each.top} for each in drawn
            ],
        }

    def _usage(self) -> dict[str, int]:
        prompt, counted = len(self.wanted.prompt), self._counted
        return {"prompt_tokens": prompt, "completion_tokens": counted, "total_tokens": prompt + counted}


def error_body(status: int, text: str) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if status < 500 else "internal_error" if status == 500 else "unavailable_error"
    return {"error": {"message": text, "type": kind, "code": status}}
