"""Encoders: the hidden states of transformers, pooled as files say it, the same bytes alone and together; pairs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.end_to_end.encoders import ENCODERS, MAX_TOKENS, Encoder, prompts, save, save_modules

from octavo import LLM, PoolingParams, SamplingParams
from octavo.errors import InvalidParameterError, PromptTooLongError

RAW = PoolingParams(normalize=False)
GetEncoder = Callable[[str], Encoder]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> GetEncoder:
    saved: dict[str, Encoder] = {}

    def get(name: str) -> Encoder:
        if name not in saved:
            folder = tmp_path_factory.mktemp(name)
            saved[name] = Encoder(folder=folder, reference=save(name, folder))
        return saved[name]

    return get


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(folder: Path, **options: Any) -> LLM:
        made.append(LLM(str(folder), **{"dtype": "float32", "packed_cache_gib": 0.0, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.check_integrity()
        llm.exit()


def vectors(llm: LLM, given: list[dict[str, list[int]]], params: PoolingParams = RAW) -> list[list[float]]:
    outputs = llm.embed(given, params, use_tqdm=False)  # type: ignore[arg-type]  # prompts of token ids
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs), outputs[0].outputs
    return [output.embedding or [] for output in outputs]


@pytest.mark.parametrize("name", ENCODERS)
def test_states_are_those_of_transformers(name: str, encoder: GetEncoder, open_llm: Callable[..., LLM]) -> None:
    model, given = encoder(name), prompts()
    llm = open_llm(model.folder)
    states = [model.states(each["prompt_token_ids"]).numpy() for each in given]
    expected = {"mean": [each.mean(0) for each in states], "cls": [each[0] for each in states]}
    expected["last"] = [each[-1] for each in states]
    for pooling, wanted in expected.items():
        for vector, right in zip(
            vectors(llm, given, PoolingParams(normalize=False, pooling=pooling)), wanted, strict=True
        ):
            np.testing.assert_allclose(vector, right, rtol=2e-4, atol=2e-5)
    alone = [vectors(llm, [each])[0] for each in given]
    assert vectors(llm, given) == alone  # the mean


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
@pytest.mark.parametrize("name", ["ModernBert", pytest.param("Gemma3Text", marks=pytest.mark.full)])
def test_same_bytes(name: str, options: dict[str, Any], encoder: GetEncoder, open_llm: Callable[..., LLM]) -> None:
    llm, given = open_llm(encoder(name).folder, **options), prompts()
    alone = [vectors(llm, [each])[0] for each in given]
    assert vectors(llm, [*given[::-1], *given]) == [*alone[::-1], *alone]
    exact = [encoder(name).states(each["prompt_token_ids"]).numpy().mean(0) for each in given]
    for vector, right in zip(alone, exact, strict=True):
        assert np.dot(vector, right) / np.linalg.norm(vector) / np.linalg.norm(right) > 0.98


@pytest.mark.parametrize("is_new", [False, True])
def test_files_of_sentence_transformers(is_new: bool, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    model = save("Gemma3Text", tmp_path)
    linears = save_modules(tmp_path, 48, "mean", is_new=is_new, normalizes=True, dense=(60, 48))
    llm, given = open_llm(tmp_path), prompts()
    for prompt, vector in zip(given, vectors(llm, given, PoolingParams()), strict=True):
        pooled = Encoder(folder=tmp_path, reference=model).states(prompt["prompt_token_ids"]).mean(0)
        with torch.inference_mode():
            for linear in linears:
                pooled = linear(pooled)
        right = torch.nn.functional.normalize(pooled, dim=0)
        assert float(torch.dot(torch.tensor(vector), right)) == pytest.approx(1.0, abs=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1.0)
    with pytest.raises(InvalidParameterError, match="dimensions=47: one of 48, 128"):
        llm.embed("w1", PoolingParams(dimensions=47))
    with pytest.raises(PromptTooLongError, match=f"maximum context length is {MAX_TOKENS} tokens"):
        llm.embed("w1 " * MAX_TOKENS)
    with pytest.raises(InvalidParameterError, match="writes no text"):
        llm.generate("w1", SamplingParams(max_tokens=1))


@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "ModernBert"])
def test_classifiers_rank_pairs(name: str, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    model = save(name, tmp_path, "ForSequenceClassification", num_labels=1, id2label={0: "score"})
    llm = open_llm(tmp_path)
    query, documents = "w1 w2 w3", ["w4 w5 w6", "w7", "w8 " * 40 + "w9", "w4"]
    tokenizer = llm.get_tokenizer()
    expected = []
    for document in documents:
        first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
        ids = [2, *first, 3, *second, 3]
        kinds = torch.tensor([[0] * (len(first) + 2) + [1] * (len(second) + 1)])
        inputs = {"token_type_ids": kinds} if name == "Bert" else {}
        with torch.inference_mode():
            expected.append(torch.sigmoid(model(torch.tensor([ids]), **inputs).logits[0, 0]).item())
    assert llm.score(query, documents, use_tqdm=False) == pytest.approx(expected, abs=2e-5)
    assert [llm.score(query, each, use_tqdm=False)[0] for each in documents] == llm.score(
        query, documents, use_tqdm=False
    )
    with pytest.raises(PromptTooLongError, match=r"documents\[1\]"):
        llm.score(query, ["w1", "w1 " * MAX_TOKENS])


@pytest.mark.full
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_two_ranks(name: str, encoder: GetEncoder, open_llm: Callable[..., LLM]) -> None:
    folder, given = encoder(name).folder, prompts()
    one, two = (vectors(open_llm(folder, tensor_parallel_size=size), given) for size in (1, 2))
    for vector, right in zip(two, one, strict=True):
        np.testing.assert_allclose(vector, right, rtol=1e-4, atol=1e-5)
