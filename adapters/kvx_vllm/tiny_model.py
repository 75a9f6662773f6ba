"""A tiny random model with a word-level tokenizer: `python -m kvx_vllm.tiny_model FOLDER [SEED [FAMILY]]`.

For demos and tests without any download: 14 MB, made in seconds, the same bytes for the same seed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 2048
WINDOW = 64
"""Tokens that a layer with a window looks back to, the present one included."""
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
# vLLM's kernel for CPUs has the widths of DeepSeek's latent built in. Here no layer has experts.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None}
_NO_EXPERTS = {"first_k_dense_replace": 4, "n_routed_experts": 4, "num_experts_per_tok": 1}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "full": (LlamaConfig, LlamaForCausalLM, _HEADS),
    "latent": (
        *(DeepseekV2Config, DeepseekV2ForCausalLM),
        {"num_attention_heads": 4, "num_key_value_heads": 4, **_LATENT, **_NO_EXPERTS},
    ),
    "window": (MistralConfig, MistralForCausalLM, {**_HEADS, "sliding_window": WINDOW}),
    "mixed": (
        *(MistralConfig, MistralForCausalLM),
        {**_HEADS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
"""Configuration, model, and what differs: full attention, multi-head latent attention (MLA), a sliding window in every
layer, and in every other one."""


def make(folder: str, seed: int = 0, family: str = "full") -> None:
    """Write model and tokenizer into `folder`."""
    torch.manual_seed(seed)
    configuration, kind, special = FAMILIES[family]
    config = configuration(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype=torch.float32,
        **special,
    )
    model = kind(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                # Wider than the usual 0.02: attention matters, and logits lie far apart.
                weights.normal_(0, 1.0 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    ).save_pretrained(folder)


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    make(sys.argv[1], seed, sys.argv[3] if len(sys.argv) > 3 else "full")
