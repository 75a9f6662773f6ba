"""Where the beginnings of past prompts lie: the next turn of a conversation begins with all of the last one."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

MOST = 0.5
"""Share of a prompt that has to be known: less is a system prompt that all share."""
_KEPT = 1 << 16
_TOKENS = 64
_CHARACTERS = 256
_PER_TOKEN = 4
"""Characters, roughly: where the prompt is text its tokens are not known here."""
_MARKS = 256


@frozen
class Prompt:
    """`marks` are digests of its beginnings with their lengths, shortest first; lengths are in tokens, estimated."""

    marks: tuple[tuple[bytes, int], ...]
    tokens: int


@define(eq=False)
class Homes:
    """The decode instance that served each beginning last; the oldest are forgotten."""

    _served: OrderedDict[bytes, str] = field(factory=OrderedDict)

    def find(self, prompt: Prompt) -> str | None:
        """The URL of the instance that has most of this prompt."""
        for digest, length in reversed(prompt.marks):
            if length < MOST * prompt.tokens:
                return None
            if digest in self._served:
                self._served.move_to_end(digest)
                return self._served[digest]
        return None

    def keep(self, prompt: Prompt, url: str) -> None:
        for digest, _ in prompt.marks:
            self._served[digest] = url
            self._served.move_to_end(digest)
        while len(self._served) > _KEPT:
            self._served.popitem(last=False)


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    """What a request's body says of its prompt: messages, token ids or text; anything else has no marks."""
    hasher = hashlib.sha256(json.dumps([body.get("model"), body.get("cache_salt")]).encode())
    marks: list[tuple[bytes, int]] = []
    tokens = 0
    for piece, length, is_full in _pieces(body):
        tokens += length
        if len(marks) < _MARKS and is_full:
            data = (piece if isinstance(piece, str) else json.dumps(piece)).encode(errors="replace")
            hasher.update(len(data).to_bytes(8) + data)
            marks.append((hasher.digest()[:16], tokens))
    return Prompt(tuple(marks), tokens)


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[Any, int, bool]]:
    """Each with its length in tokens, and whether it stays the same when the prompt grows."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        for message in messages:
            text = json.dumps(message)
            yield text, max(1, len(text) // _PER_TOKEN), True
    elif isinstance(prompt, str):
        for piece in _cut(prompt, _CHARACTERS):
            yield piece, max(1, len(piece) // _PER_TOKEN), len(piece) == _CHARACTERS
    elif isinstance(prompt, list):
        for piece in _cut(prompt, _TOKENS):
            yield piece, len(piece), len(piece) == _TOKENS


def _cut(whole: Sequence[Any], size: int) -> Iterator[Any]:
    """Full pieces stay the same when the prompt grows; the last one may be shorter."""
    return (whole[start : start + size] for start in range(0, len(whole), size))
