"""Writing a random model as a folder that transformers, vLLM and this engine load alike."""

from __future__ import annotations

import json
from pathlib import Path

from kvx_reference.engine.config import ModelConfig
from kvx_reference.engine.tokenizer import tokenizer_files
from kvx_reference.engine.weights import random_tensors, save_tensors


def save_random_model(folder: Path, config: ModelConfig, seed: int) -> None:
    """The same bytes for the same configuration and seed. config.json, which makes it complete, is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", random_tensors(config, seed))
    for name, content in {**tokenizer_files(config.vocab_size), "config.json": config.to_json()}.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
