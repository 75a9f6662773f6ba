"""What kvx reads out of vLLM's own objects."""

from __future__ import annotations

from typing import Any

import pytest

# What vLLM's own imports warn of is not kvx's.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


def request(request_id: str = "cmpl-a-0-0123abcd", **more: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    fields = {"prompt_token_ids": [3, 4, 5], "sampling_params": SamplingParams(), "pooling_params": None, **more}
    return Request(request_id, **fields)


def traits(made: Any) -> Any:
    from kvx_vllm import compat

    return compat.traits(made)


def test_a_plain_request() -> None:
    from kvx_vllm.records import PLAIN

    assert traits(request()) == PLAIN


def test_lora_adapters_other_inputs_and_embeddings_are_refused_with_a_sentence() -> None:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    image = MultiModalFeatureSpec(data=None, modality="image", identifier="x", mm_position=PlaceholderRange(0, 1))
    lora = LoRARequest("adapter", 1, "adapter")
    assert "LoRA" in str(traits(request(lora_request=lora)).obstacle)
    assert "multimodal" in str(traits(request(mm_features=[image])).obstacle)
    embeddings = request(prompt_token_ids=None, prompt_embeds=torch.zeros(3, 8))
    assert "embeddings" in str(traits(embeddings).obstacle)


@pytest.mark.parametrize(
    ("request_id", "siblings", "first"),
    [
        ("cmpl-a-0-0123abcd", False, True),
        ("cmpl-a-1-0123abcd", False, False),
        ("0_cmpl-a-0-0123abcd", True, True),
        ("1_cmpl-a-0-0123abcd", True, False),
        ("0_cmpl-a-1-0123abcd", True, False),
        ("chatcmpl-a-7-0123abcd", False, True),
        ("2_chatcmpl-a-0123abcd", True, False),
    ],
)
def test_siblings_of_one_request(request_id: str, siblings: bool, first: bool) -> None:
    found = traits(request(request_id))
    assert (found.siblings, found.first) == (siblings, first)


def test_names_that_vllm_gives_to_siblings() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    made = request("cmpl-a-0-0123abcd")
    made.external_req_id, made.params = "cmpl-a-0", SamplingParams(n=2)
    children = [ParentRequest(made).get_child_info(index)[0] for index in (0, 1)]
    assert [traits(request(child)).first for child in children] == [True, False]
    assert all(traits(request(child)).siblings for child in children)
