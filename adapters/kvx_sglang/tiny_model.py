"""A tiny random Llama with a word-level tokenizer: `python -m kvx_sglang.tiny_model FOLDER [SEED]`.

For demos and tests without any download: 3 MB, made in seconds, the same bytes for the same seed.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[import-not-found]

VOCABULARY = 512
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def make(folder: str, seed: int = 0) -> None:
    """Write model and tokenizer into `folder`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        # Far above the usual 0.02, at which the tokens hardly depend on what attention sees.
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=_SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos, unknown = _SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
