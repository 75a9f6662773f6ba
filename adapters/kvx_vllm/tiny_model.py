"""A tiny random Llama with a word-level tokenizer: `python -m kvx_vllm.tiny_model FOLDER [SEED]`.

For demos and tests without any download: 14 MB, made in seconds, the same bytes for the same seed.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[import-not-found]

VOCABULARY = 2048


def make(folder: str, seed: int = 0) -> None:
    """Write model and tokenizer into `folder`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).float()
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
    make(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
