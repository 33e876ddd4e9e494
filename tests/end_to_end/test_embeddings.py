"""A request without sampling parameters gets a vector: transformers' hidden state, the same bytes on every path."""

import numpy as np
import pytest
import torch
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, Checkpoint, MakeLLM
from tests.end_to_end.support import answers
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS

from octavo import LLM, PoolingParams
from octavo.errors import InvalidParameterError

RAW = PoolingParams(normalize=False)


def vectors(llm: LLM, prompts: object = PROMPTS, params: PoolingParams = RAW) -> list[list[float] | None]:
    outputs = llm.embed(prompts, params, use_tqdm=False)  # type: ignore[arg-type]  # a list of prompts
    assert all(output.finished and output.outputs[0].finish_reason == "stop" for output in outputs)
    assert not any(output.outputs[0].token_ids for output in outputs)
    return [output.embedding for output in outputs]


def test_it_is_the_hidden_state_of_transformers(llm: LLM, model: Checkpoint) -> None:
    for prompt, vector in zip(PROMPTS, vectors(llm), strict=True):
        with torch.inference_mode():
            token_ids = torch.tensor([prompt["prompt_token_ids"]])  # type: ignore[index,typeddict-item]
            expected = model.reference.model(token_ids).last_hidden_state[0, -1]
        assert vector is not None
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-mixed-windows", "qwen3-mixed-windows in bfloat16"])
def test_same_bytes(name: str, make_llm: MakeLLM) -> None:
    alone = [vectors(make_llm(name, enable_prefix_caching=False), prompt)[0] for prompt in PROMPTS]
    chunked = make_llm(name, max_num_batched_tokens=14, num_kv_blocks=MAX_LEN // BLOCK_SIZE)
    assert vectors(chunked) == alone
    assert vectors(chunked) == alone  # from the cache


def test_beside_requests_that_generate(make_llm: MakeLLM) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    llm = make_llm("qwen3", speculative_config=drafts)
    expected, expected_vectors = answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)), vectors(llm)
    names = [llm.engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    pooled = [llm.engine.add_request(prompt, RAW) for prompt in PROMPTS]
    seen = {}
    while llm.engine.has_unfinished_requests():
        seen.update({output.request_id: output for output in llm.engine.step()[0]})
    assert answers([seen[name] for name in names]) == expected
    assert [seen[name].embedding for name in pooled] == expected_vectors


def test_length_and_dimensions(llm: LLM) -> None:
    (whole,), (unit,) = vectors(llm, PROMPTS[4]), vectors(llm, PROMPTS[4], PoolingParams())
    (first,) = vectors(llm, PROMPTS[4], PoolingParams(dimensions=8))
    assert whole is not None
    assert unit == pytest.approx(np.array(whole) / np.linalg.norm(whole))
    assert first == pytest.approx(np.array(whole[:8]) / np.linalg.norm(whole[:8]))


@pytest.mark.parametrize("dimensions", [0, -1, 1.5, 10**6])
def test_what_a_vector_cannot_be(llm: LLM, dimensions: int) -> None:
    with pytest.raises(InvalidParameterError, match="dimensions"):
        llm.embed(PROMPTS[0], PoolingParams(dimensions=dimensions))
