"""Drafts change no bit of an answer: right, wrong and half-right ones, in whatever company and arithmetic."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end import drafting
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, DraftFrom, GetCheckpoint, MakeLLM, Sequences, open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.end_to_end.test_storm import storm_requests, weather_storm
from tests.end_to_end.test_structured import PROMPT, mixed_params
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM
from octavo.contracts.engine import EngineCoreOutputs
from octavo.engine import inproc_client
from octavo.engine.output_processor import OutputProcessor, StepResult
from octavo.engine.process_client import ProcessClient
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams
from octavo.testing import KnownDrafter

MODELS: list[tuple[str, dict[str, Any]]] = [("qwen3-mixed-windows", {}), *pick([], [("llama", {}), ("mixtral", {})])]
if native_kernels() is not None:
    MODELS += [("qwen3-mixed-windows in bfloat16", {}), *pick([], [("demo in bfloat16", {"quantization": "int8"})])]


def sequences(llm: LLM, prompts: Sequence[Prompt] = PROMPTS, params: Sequence[SamplingParams] = PARAMS) -> Sequences:
    """Return what all requests say, prompts included, beyond where they end."""
    longer = [each.replace(max_tokens=(each.max_tokens or 0) + 6, logprobs=None, stop=()) for each in params]
    outputs = llm.generate(prompts, longer, use_tqdm=False)
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
        pytest.param({"max_num_batched_tokens": 18}, id="chunked", marks=pytest.mark.full),
        pytest.param({"num_kv_blocks": MAX_LEN // BLOCK_SIZE}, id="preempted", marks=pytest.mark.full),
        pytest.param(
            {"max_num_batched_tokens": 18, "num_kv_blocks": MAX_LEN // BLOCK_SIZE}, id="chunked and preempted"
        ),
    ],
)
def test_answers_are_those_without_drafts(
    model: tuple[str, dict[str, Any]],
    options: dict[str, Any],
    alone: tuple[list[Any], list[list[int]]],
    make_llm: MakeLLM,
    draft_from: DraftFrom,
) -> None:
    expected, known = alone
    drafter = draft_from(known)
    llm = make_llm(model[0], **model[1], **options)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert drafter.num_proposed > drafter.num_accepted > 10


def test_stages(
    make_llm: MakeLLM, checkpoint: GetCheckpoint, draft_from: DraftFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that does not sample learns what was kept by the next step."""
    monkeypatch.setattr(inproc_client, "make_executor", ThreadedRanks)
    with open_llm(checkpoint, "qwen3-mixed-windows") as llm:
        expected, known = one_by_one(llm), sequences(llm)
    drafter = draft_from(known)
    for options in ({}, {"max_num_batched_tokens": 14, "num_kv_blocks": 24}):
        llm = make_llm("qwen3-mixed-windows", pipeline_parallel_size=2, **options)
        for _ in range(2):  # the second time, prefixes are in the cache
            assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert drafter.num_proposed > drafter.num_accepted > 10


def test_constraints(
    make_llm: MakeLLM, checkpoint: GetCheckpoint, draft_from: DraftFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a draft only what the constraint allows after it may come."""
    monkeypatch.setattr(inproc_client, "make_executor", ThreadedRanks)
    params = mixed_params()[::5]
    prompts = [PROMPT] * len(params)
    with open_llm(checkpoint, "demo", max_model_len=512) as llm:
        expected, known = answers(llm.generate(prompts, params, use_tqdm=False)), sequences(llm, prompts, params)
    drafter = draft_from(known)
    for num_stages in pick((1,), (1, 2)):  # by default test_draft_model.py has two
        llm = make_llm("demo", max_model_len=512, pipeline_parallel_size=num_stages)
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert drafter.num_proposed > drafter.num_accepted > 30


@pytest.mark.parametrize(("seed", "num_stages"), pick([(1, 2)], [(0, 1), (3, 1), (1, 2)]))
def test_a_storm(
    seed: int, num_stages: int, checkpoint: GetCheckpoint, draft_from: DraftFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts, preemptions, stop strings, minimum lengths and prompt logprobs, at any moment."""
    monkeypatch.setattr(inproc_client, "make_executor", ThreadedRanks)
    prompts, params = zip(*storm_requests(random.Random(seed)), strict=True)
    drafters: list[KnownDrafter] = []
    weather_storm(
        seed,
        checkpoint,
        lambda llm: drafters.append(draft_from(sequences(llm, prompts, params))),
        pipeline_parallel_size=num_stages,
    )
    assert drafters[0].num_accepted > 20


@pytest.fixture
def several_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List how many tokens a request got, wherever it got several in a step."""
    counts: list[int] = []
    process = OutputProcessor.process

    def note(self: OutputProcessor, outputs: EngineCoreOutputs) -> StepResult:
        counts.extend(count for count in outputs.num_new_tokens if count > 1)
        return process(self, outputs)

    monkeypatch.setattr(OutputProcessor, "process", note)
    return counts


def tell_processes(known: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "known.json").write_text(json.dumps(known))
    monkeypatch.setenv(drafting.VARIABLE, str(tmp_path / "known.json"))


@pytest.mark.full
def test_replicas(
    make_llm: MakeLLM,
    checkpoint: GetCheckpoint,
    several_at_once: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engine cores in processes of their own, one of which has its requests end by stop strings."""
    params = [each.replace(stop=("7", "a")) if at % 2 else each for at, each in enumerate(PARAMS)]
    with open_llm(checkpoint, "llama") as llm:
        expected = answers(llm.generate(PROMPTS, params, use_tqdm=False))
        tell_processes(sequences(llm), tmp_path, monkeypatch)
    monkeypatch.setattr(ProcessClient, "command", [sys.executable, "-m", drafting.__name__])
    llm = make_llm("llama", data_parallel_size=2)
    assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert len(several_at_once) > 10
