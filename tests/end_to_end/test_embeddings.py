"""A request without sampling parameters gets a vector: transformers' hidden state, the same bytes on every path."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, Checkpoint, GetCheckpoint, MakeLLM
from tests.end_to_end.encoders import Encoder, save, save_modules
from tests.end_to_end.support import answers
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS

from octavo import LLM, PoolingParams, SamplingParams
from octavo.engine.ranking import PairScoring
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
    by_itself = make_llm(name, enable_prefix_caching=False)
    alone = [vectors(by_itself, prompt)[0] for prompt in PROMPTS]
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


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_whole_prompts(pooling: str, make_llm: MakeLLM, checkpoint: GetCheckpoint) -> None:
    params, reference = PoolingParams(normalize=False, pooling=pooling), checkpoint("qwen3").reference
    by_itself = make_llm("qwen3", enable_prefix_caching=False)
    alone = [vectors(by_itself, prompt, params)[0] for prompt in PROMPTS]
    for prompt, vector in zip(PROMPTS, alone, strict=True):
        with torch.inference_mode():
            token_ids = torch.tensor([prompt["prompt_token_ids"]])  # type: ignore[index,typeddict-item]
            states = reference.model(token_ids).last_hidden_state[0]
        expected = states.mean(0) if pooling == "mean" else states[0]
        assert vector is not None
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-5)
    chunked = make_llm("qwen3", max_num_batched_tokens=7, num_kv_blocks=MAX_LEN // BLOCK_SIZE)
    vectors(chunked)  # prefixes that these may not use
    assert vectors(chunked, PROMPTS, params) == alone


def test_next_tokens(make_llm: MakeLLM) -> None:
    llm, ids = make_llm("qwen3"), (5, 1, 96)
    found = vectors(llm, PROMPTS, PoolingParams(label_token_ids=ids))
    for prompt, logprobs in zip(PROMPTS, found, strict=True):
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
        assert logprobs is not None
        table = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs
        assert table is not None
        shown = [
            (each, table[0][token_id].logprob)
            for each, token_id in zip(logprobs, ids, strict=True)
            if token_id in table[0]
        ]
        assert all(each == pytest.approx(right, abs=1e-6) for each, right in shown)
        assert all(each < 0.0 for each in logprobs)
    assert [vectors(llm, prompt, PoolingParams(label_token_ids=ids))[0] for prompt in PROMPTS] == found
    with pytest.raises(InvalidParameterError, match="label_token_ids=97"):
        llm.embed(PROMPTS[0], PoolingParams(label_token_ids=(97,)))


def test_files_of_an_embedder(tmp_path: Path) -> None:
    model = save("Qwen3", tmp_path, "Model", head_dim=16, num_key_value_heads=2, tie_word_embeddings=False)
    save_modules(tmp_path, 48, "lasttoken", is_new=False, normalizes=True)
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=9, max_model_len=128) as llm:
        texts = ["w1 w2", "w3 " * 30]
        for output in llm.embed(texts, use_tqdm=False):
            assert output.prompt_token_ids[-1] == 3  # what the tokenizer puts behind a text
            states = Encoder(folder=tmp_path, reference=model).states(output.prompt_token_ids)
            right = torch.nn.functional.normalize(states[-1], dim=0)
            assert output.embedding == pytest.approx(right.tolist(), abs=1e-5)
        assert len(llm.embed("w1", PoolingParams(dimensions=5), use_tqdm=False)[0].embedding or ()) == 5
        near, far = llm.score("w1 w2", ["w1 w2", "w9"], use_tqdm=False)
        assert near == pytest.approx(1.0)
        assert far < near
        with pytest.raises(InvalidParameterError, match="writes no text"):  # its files have no head
            llm.generate("w1")


def test_yes_or_no(tmp_path: Path) -> None:
    model = save("Qwen3", tmp_path, "ForCausalLM", head_dim=16, num_key_value_heads=2, max_position_embeddings=512)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["model"]["vocab"] |= {"yes": 95, "no": 96}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    with LLM(str(tmp_path), dtype="float32", pooler="rerank", max_model_len=512) as llm:
        with pytest.raises(InvalidParameterError, match=r"documents\[1\]"):
            llm.score("w1", ["w2", ""])
        found = llm.score("w1 w2", ["w3", "w4 w5"], use_tqdm=False)
        scoring = PairScoring(llm.engine.front, ["w1 w2"], ["w3", "w4 w5"])
        for prompt, score in zip(scoring.prompts, found, strict=True):
            ids = prompt["prompt_token_ids"]  # type: ignore[index]  # token ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1, [95, 96]]
            assert score == pytest.approx(torch.softmax(logits, 0)[0].item(), abs=1e-5)
