"""Text to tokens and back.

A word-level tokenizer.json, which is what the random model has, is read here. Every other kind
needs the package `tokenizers`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvx_reference.engine.config import ModelError

UNKNOWN = 2
_SPECIAL = ("<s>", "</s>", "<unk>")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str:
        """The text without special tokens; it may end in U+FFFD while a character is incomplete."""
        ...


class WordTokenizer:
    """One token per word or punctuation mark of a fixed vocabulary; other words become `unknown`."""

    def __init__(self, words: Mapping[str, int], special: Sequence[str] = _SPECIAL, unknown: int = UNKNOWN) -> None:
        self._words = dict(words)
        self._texts = {token: word for word, token in words.items()}
        self._hidden = {words[word] for word in special if word in words}
        self._unknown = unknown
        self._pattern = re.compile("|".join([*map(re.escape, special), r"\w+|[^\w\s]+"]))

    def encode(self, text: str) -> list[int]:
        return [self._words.get(word, self._unknown) for word in self._pattern.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self._texts.get(token, "") for token in tokens if token not in self._hidden)


def vocabulary(size: int) -> dict[str, int]:
    """The words of a random model: three special ones, then w3, w4, ..."""
    return {**{word: token for token, word in enumerate(_SPECIAL)}, **{f"w{token}": token for token in range(3, size)}}


def tokenizer_files(size: int) -> dict[str, dict[str, Any]]:
    """By name the files that give a random model of `size` words its tokenizer, as transformers reads them."""
    added = [
        {"id": token, "content": word, "special": True, "lstrip": False, "rstrip": False}
        | {"single_word": False, "normalized": False}
        for token, word in enumerate(_SPECIAL)
    ]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary(size), "unk_token": "<unk>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": 1 << 20,
        },
    }


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The folder's tokenizer.json, or without one the words of a random model. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return WordTokenizer(vocabulary(vocab_size))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        model = found["model"]
        if model["type"] == "WordLevel" and found["pre_tokenizer"] == {"type": "Whitespace"}:
            special = [token["content"] for token in found["added_tokens"]]
            return WordTokenizer(model["vocab"], special, model["vocab"][model["unk_token"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: {error!r}") from error
    try:
        package = importlib.import_module("tokenizers")
    except ImportError:
        raise ModelError(f"{path} needs the package tokenizers: pip install 'kvx[reference]'") from None
    return _FastTokenizer(package.Tokenizer.from_file(str(path)))


class _FastTokenizer:
    """Any tokenizer of the package `tokenizers`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))
