"""What a model is: the part of Hugging Face's config.json that decides the arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen


class ModelError(Exception):
    """A model folder cannot be used; the text says which file and what is wrong with it."""


@frozen
class ModelConfig:
    """A Llama: sizes as in config.json, `eos` the tokens that end a text."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    tied: bool = False
    bos: int = 0
    eos: frozenset[int] = frozenset({1})

    def to_json(self) -> dict[str, Any]:
        """config.json for this model, as transformers and vLLM read it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos,
            "eos_token_id": min(self.eos) if len(self.eos) == 1 else sorted(self.eos),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float32",
        }


TINY = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    max_position=4096,
)
"""The random model of demos and tests: 14 MB."""


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelError for a folder without a config.json, or a model that is no plain Llama."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(found, Mapping):
        raise ModelError(f"{path} holds no object")
    try:
        return parse_config(found)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_config(found: Mapping[str, Any]) -> ModelConfig:
    """The configuration in the content of a config.json. Raises ModelError."""
    if found.get("model_type") != "llama":
        raise ModelError(f"model_type is {found.get('model_type')!r}: this engine computes llama only")
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if found.get(key, plain) != plain:
            raise ModelError(f"{key} is {found[key]!r}: this engine computes {plain!r} only")
    heads = _size(found, "num_attention_heads")
    hidden = _size(found, "hidden_size")
    config = ModelConfig(
        vocab_size=_size(found, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(found, "intermediate_size"),
        layers=_size(found, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(found, "num_key_value_heads", heads),
        head_dim=_size(found, "head_dim", hidden // heads),
        max_position=_size(found, "max_position_embeddings", 2048),
        rope_theta=_rope_theta(found),
        rms_eps=_positive(found, "rms_norm_eps", 1e-6),
        tied=bool(found.get("tie_word_embeddings", False)),
        bos=_tokens(found, "bos_token_id", 1)[0],
        eos=frozenset(_tokens(found, "eos_token_id", 2)),
    )
    if config.heads % config.kv_heads:
        raise ModelError(f"{config.heads} heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelError(f"head_dim is {config.head_dim}: rotary embedding needs an even number")
    return config


def _rope_theta(found: Mapping[str, Any]) -> float:
    """Base of the rotary embedding; newer transformers keep it inside of `rope_parameters`."""
    for key in ("rope_parameters", "rope_scaling"):
        scaling = found.get(key)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            raise ModelError(f"{key} is {scaling!r}, not an object")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{key} is of type {kind!r}: this engine computes plain rotary embedding only")
        if "rope_theta" in scaling:
            return _positive(scaling, "rope_theta", 10000.0)
    return _positive(found, "rope_theta", 10000.0)


def _size(found: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = found.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ModelError(f"{key} is {value!r}, not a positive integer")
    return value


def _positive(found: Mapping[str, Any], key: str, default: float) -> float:
    value = found.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{key} is {value!r}, not a positive number")
    return float(value)


def _tokens(found: Mapping[str, Any], key: str, default: int) -> list[int]:
    value = found.get(key)
    tokens = [default] if value is None else value if isinstance(value, list) else [value]
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelError(f"{key} is {value!r}, not a token")
    return tokens
