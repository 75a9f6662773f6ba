"""Model folders: what is written is read again, and what is broken is refused with a sentence."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx_reference.engine.config import TINY, ModelConfig, ModelError, parse_config, read_config
from kvx_reference.engine.engine import load_model
from kvx_reference.engine.folder import save_random_model
from kvx_reference.engine.model import Model
from kvx_reference.engine.tokenizer import load_tokenizer, vocabulary
from kvx_reference.engine.weights import load_tensors, random_tensors, save_tensors


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    save_random_model(tmp_path, model.config, 7)
    return tmp_path


def test_a_saved_model_is_the_model(model: Model, folder: Path) -> None:
    read = load_model(folder)
    assert read.config == model.config
    assert np.array_equal(read._weights.layers[2].down, model._weights.layers[2].down)
    assert np.array_equal(read._weights.head, model._weights.head)
    before = (folder / "model.safetensors").read_bytes()
    save_random_model(folder, model.config, 7)
    assert (folder / "model.safetensors").read_bytes() == before
    save_random_model(folder, model.config, 8)
    assert (folder / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mistral"}, "llama only"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'llama3'"),
        ({"rope_parameters": "yes"}, "not an object"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_models_that_would_be_computed_wrong_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        parse_config({**TINY.to_json(), **change})


def test_what_config_json_leaves_out() -> None:
    shape = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    config = parse_config({"model_type": "llama", "num_attention_heads": 4, **shape, "eos_token_id": [1, 7]})
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.tied) == (4, 16, 10000.0, False)
    assert config.eos == {1, 7}
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config({**TINY.to_json(), **newer}).rope_theta == 5e5
    assert parse_config(evolve(TINY, eos=frozenset({1, 2})).to_json()).eos == {1, 2}


@pytest.mark.parametrize("content", [None, "[]", "{", "\xff"])
def test_a_folder_without_a_readable_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_tensor_that_is_missing_or_has_another_shape(model: Model, folder: Path) -> None:
    tensors = random_tensors(model.config, 7)
    bent = {**tensors, "model.norm.weight": np.ones(5, dtype=np.float32)}
    save_tensors(folder / "model.safetensors", bent)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(5,\)"):
        load_model(folder)
    del bent["model.norm.weight"]
    save_tensors(folder / "model.safetensors", bent)
    with pytest.raises(ModelError, match=r"no tensor model\.norm\.weight"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no"):
        load_model(folder)


def _file(folder: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, None),
        ({"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}, None),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "its place is 0..12 of 8"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}, "needs 4 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "its place"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no proper shape"),
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}, "needs"),
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "stored as I64"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        (None, "NoneType"),
    ],
)
def test_a_file_that_lies_about_its_tensors(tmp_path: Path, entry: object, text: str | None) -> None:
    _file(tmp_path, {"t": entry}, bytes(8))
    if text is None:
        assert not load_tensors(tmp_path)["t"].any()
    else:
        with pytest.raises(ModelError, match=text):
            load_tensors(tmp_path)


_VALUES = st.recursive(
    st.none() | st.integers(-3, 2**70) | st.sampled_from(["F32", "F16", "BF16", "dtype", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_ENTRIES = st.fixed_dictionaries({}, optional={"dtype": _VALUES, "shape": _VALUES, "data_offsets": _VALUES})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=3), _ENTRIES | _VALUES, max_size=3) | _VALUES, st.binary(max_size=16))
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    _file(folder, header, data)
    with contextlib.suppress(ModelError):
        assert all(tensor.nbytes <= 2 * len(data) for tensor in load_tensors(folder).values())


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, b"\xff" * 8, b"\x08" + b"\0" * 7 + b"{}", b"\2" + b"\0" * 7 + b"[]"]
)
def test_a_file_without_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        load_tensors(tmp_path)


def test_a_model_without_a_tokenizer_has_numbered_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, 50)
    assert tokenizer.encode("w3 w49 w50 hello </s>") == [3, 49, 2, 2, 1]
    assert tokenizer.decode([3, 1, 49, 60]) == "w3 w49 "


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 50)


def test_the_saved_tokenizer_is_the_one_without_a_file(model: Model, folder: Path, tmp_path: Path) -> None:
    config: ModelConfig = model.config
    saved = load_tokenizer(folder, config.vocab_size)
    for word, token in vocabulary(config.vocab_size).items():
        assert saved.encode(word) == [token]
