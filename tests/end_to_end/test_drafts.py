"""Drafts change no bit of an answer: right, wrong and half-right ones, in whatever company and arithmetic."""

from functools import partial
from typing import Any

import pytest
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_same_bytes import NUM_TOKENS, PARAMS, PROMPTS, one_by_one

from octavo import LLM
from octavo.engine import inproc_client
from octavo.engine.core import EngineCore
from octavo.kernels.native_level import native_kernels
from octavo.testing import KnownDrafter

MODELS: list[tuple[str, dict[str, Any]]] = [("llama", {}), ("qwen3-mixed-windows", {}), ("mixtral", {})]
if native_kernels() is not None:
    MODELS += [("qwen3-mixed-windows in bfloat16", {}), ("demo in bfloat16", {"quantization": "int8"})]


def sequences(llm: LLM) -> list[list[int]]:
    """Return what all requests say, prompts included, far beyond where they end."""
    params = [each.replace(max_tokens=NUM_TOKENS + 6, logprobs=None) for each in PARAMS]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.prompt_token_ids + sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: " ".join([model[0], *map(str, model[1].values())]))
def model(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    chosen: tuple[str, dict[str, Any]] = request.param
    return chosen


@pytest.fixture(scope="module")
def alone(model: tuple[str, dict[str, Any]], checkpoint: GetCheckpoint) -> tuple[list[Any], list[list[int]]]:
    with open_llm(checkpoint, model[0], **model[1]) as llm:
        return one_by_one(llm), sequences(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 18}, id="chunked"),
        pytest.param({"num_kv_blocks": MAX_LEN // BLOCK_SIZE}, id="preempted"),
    ],
)
def test_answers_are_those_without_drafts(
    model: tuple[str, dict[str, Any]],
    options: dict[str, Any],
    alone: tuple[list[Any], list[list[int]]],
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, known = alone
    vocab_size = max(map(max, known)) + 1
    drafter = KnownDrafter.of_sequences(known, vocab_size=vocab_size)
    monkeypatch.setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))
    llm = make_llm(model[0], **model[1], **options)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert drafter.num_proposed > 50
