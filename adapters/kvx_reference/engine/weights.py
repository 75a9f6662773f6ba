"""The numbers of a model: from and to safetensors in Hugging Face's naming, or drawn from a seed.

safetensors is read here because its numpy package has no bfloat16, and most models are stored so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvx_reference.engine.config import ModelConfig, ModelError

Floats = NDArray[np.float32]
_MAX_HEADER = 100 << 20
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@frozen(eq=False)
class LayerWeights:
    """One block; matrices are [out, in]."""

    attention_norm: Floats
    q: Floats
    k: Floats
    v: Floats
    o: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@frozen(eq=False)
class Weights:
    embedding: Floats
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Floats


_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def _layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = {
        "attention_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        found |= {_layer_name(layer, part): shape for part, shape in parts.items()}
    found[_NORM] = (hidden,)
    if not config.tied:
        found[_HEAD] = (config.vocab_size, hidden)
    return found


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Floats]:
    """Tensors by name, the same for the same seed.

    Much wider than trained models start with (0.02): attention matters then, and a token that was
    computed from a wrong cache is another token.
    """
    draw = np.random.default_rng(seed)
    tensors: dict[str, Floats] = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            spread = np.float32(1.0 if name == _EMBEDDING else 0.15)
            tensors[name] = draw.standard_normal(shape, dtype=np.float32) * spread
    return tensors


def assemble(config: ModelConfig, tensors: Mapping[str, Floats]) -> Weights:
    """Raises ModelError where a tensor is missing or has another shape."""
    for name, shape in shapes(config).items():
        if name not in tensors:
            raise ModelError(f"the model has no tensor {name}")
        if tensors[name].shape != shape:
            raise ModelError(f"tensor {name} has shape {tensors[name].shape}, config.json says {shape}")
    layers = tuple(
        LayerWeights(**{part: tensors[_layer_name(layer, part)] for part in _LAYER_NAMES})
        for layer in range(config.layers)
    )
    head = tensors[_EMBEDDING if config.tied else _HEAD]
    return Weights(tensors[_EMBEDDING], layers, tensors[_NORM], head)


def load_tensors(folder: Path) -> dict[str, Floats]:
    """All tensors of a model folder, as float32. Raises ModelError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors")
    tensors: dict[str, Floats] = {}
    for path in files:
        try:
            tensors |= _read_file(path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{path}: {error}") from error
    return tensors


def _read_file(path: Path) -> dict[str, Floats]:
    """One file: 8 bytes with the length of a JSON header, the header, the data. Raises ValueError where it lies."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(content[:8].tobytes(), "little")
    if len(content) < 8 or length > min(_MAX_HEADER, len(content) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
    header = json.loads(content[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    data = content[8 + length :]
    return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: Mapping[str, Any], data: NDArray[np.uint8]) -> Floats:
    kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in _ITEM_BYTES:
        raise ValueError(f"tensor {name} is stored as {kind}, this engine reads {', '.join(_ITEM_BYTES)}")
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError(f"tensor {name} has no proper shape or place")
    wanted = int(np.prod(shape, dtype=object)) * _ITEM_BYTES[kind]
    if not start <= stop <= len(data) or stop - start != wanted:
        raise ValueError(f"tensor {name} needs {wanted} bytes, its place is {start}..{stop} of {len(data)}")
    raw = data[start:stop].tobytes()
    if kind == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(raw, dtype="<f4" if kind == "F32" else "<f2").astype(np.float32).reshape(shape)


def save_tensors(path: Path, tensors: Mapping[str, Floats]) -> None:
    """Write one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # A folder that a running process has mapped must not change under it.
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, dtype="<f4").tobytes())
    os.replace(beside, path)
