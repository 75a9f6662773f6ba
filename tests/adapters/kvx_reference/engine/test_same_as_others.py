"""Greedy tokens are those of transformers and of vLLM, for the same folder; runs in vLLM's environment."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvx.cluster import Cluster, free_ports
from kvx.driver import EngineDriver, Server
from kvx_reference.engine.config import TINY
from kvx_reference.engine.engine import Engine, Settings, load_model
from kvx_reference.engine.folder import save_random_model
from kvx_reference.engine.request import Request
from kvx_reference.engine.sampling import Sampling
from kvx_reference.engine.tokenizer import load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOKENS = 16
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 23, 31, 32, 33, 48, 64, 65, 100, 128, 150, 200, 257, 300, 420, 500, 600]
Keep = Callable[[str, Mapping[str, Any]], None]


def prompts() -> list[list[int]]:
    draw = random.Random(11)  # noqa: S311
    return [[draw.randrange(3, TINY.vocab_size) for _ in range(length)] for length in LENGTHS]


def reference(folder: Path) -> list[list[int]]:
    """All prompts at once: batched decoding and chunked prefill."""
    engine = Engine(load_model(folder), Settings(blocks=400, step_tokens=100))
    got: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts()):
        engine.add(Request(str(at), tuple(prompt), Sampling(max_tokens=TOKENS, ignore_eos=True)))
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request, []).extend([output.drawn.token] if output.drawn else [])
    return [got[str(at)] for at in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    save_random_model(folder, TINY, 3)
    return folder


def by_transformers(folder: Path) -> list[list[int]]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for prompt in prompts():
        asked = torch.tensor([prompt])
        got = model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        rows.append(got[0, len(prompt) :].tolist())
    return rows


# The end token is forbidden by min_new_tokens there and ignored here: it must not come first of all.
def test_tokens_are_those_of_transformers(folder: Path, evidence: Keep) -> None:
    import transformers

    wanted, got = by_transformers(folder), reference(folder)
    assert not any(TINY.eos & set(tokens) for tokens in wanted + got)
    rows = [
        {"prompt_tokens": len(prompt), "equal": a == b} for prompt, a, b in zip(prompts(), wanted, got, strict=True)
    ]
    evidence("reference_transformers", {"version": transformers.__version__, "tokens_each": TOKENS, "prompts": rows})
    assert got == wanted
    assert len({tuple(tokens) for tokens in got}) == len(LENGTHS)


def test_other_shapes_and_what_transformers_writes_are_read_alike(tmp_path: Path) -> None:
    """Its own config.json and weights: bfloat16, tied embeddings, one key-value head, another rotary base."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0, 0.3) if weights.dim() == 2 else weights.normal_(1, 0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    read = load_model(tmp_path)
    assert read.config.tied
    assert read.config.rope_theta == 500000.0
    assert reference(tmp_path) == by_transformers(tmp_path)


def test_texts_become_the_tokens_of_the_package_tokenizers(folder: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder, TINY.vocab_size)
    for text in ("w5 w17 w2047", "w5,w6 hello  w7!?\nw8", "</s> w9 <unk><s>", "w05 w2048", ""):
        tokens = theirs(text)["input_ids"]
        assert ours.encode(text) == tokens, text
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True), text


def test_a_tokenizer_of_another_kind_is_read_by_the_package(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {text: at for at, text in enumerate([*(chr(256 + at) for at in range(80)), "Ä", "Ã", "¶", "Ġ"])}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path, len(words))
    tokens = ours.encode("ö ö")
    assert tokens == made.encode("ö ö").ids
    assert ours.decode(tokens) == "ö ö"
    assert ours.decode(tokens[:1]) == "\ufffd"


def test_tokens_are_those_of_a_vllm_server(folder: Path, evidence: Keep) -> None:
    """Each prompt alone and strictly: a first difference is a fault."""
    from kvx import plugins

    driver: EngineDriver = plugins.load().drivers()["vllm"]
    (port,) = free_ports(1)
    server = Server(str(folder), port, arguments=driver.small_model("").arguments)
    with Cluster() as cluster:
        child = cluster.start("vllm", driver.launch(server), f"http://127.0.0.1:{port}")
        cluster.wait_ready(child)
        started = time.monotonic()
        wanted = []
        for prompt in prompts():
            body = {"model": str(folder), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            request = urllib.request.Request(  # noqa: S310 - our own server
                f"{child.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                wanted.append(json.load(answer)["choices"][0]["token_ids"])
        seconds = time.monotonic() - started
    got = reference(folder)
    rows = [
        {"prompt_tokens": len(prompt), "equal": a == b} for prompt, a, b in zip(prompts(), wanted, got, strict=True)
    ]
    evidence("reference_vllm", {"tokens_each": TOKENS, "prompts": rows, "seconds": round(seconds, 2)})
    assert got == wanted
