"""A draft model changes no bit of an answer, whatever it guesses, and its guesses are used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.end_to_end.test_pipeline import ranks  # noqa: F401 - threads
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.end_to_end.test_storm import weather_storm
from tests.end_to_end.test_structured import PROMPT, mixed_params
from tests.models.tiny import TINY_MODELS

from octavo import LLM
from octavo.demo import demo_model_path
from octavo.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

GetDraft = Callable[[str], str]
NAMES = ["llama", "qwen3-mixed-windows"]
MODELS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES[pick(1, 0) :]]
if native_kernels() is not None:
    MODELS += pick([], [("llama in bfloat16", {}), ("demo in bfloat16", {"quantization": "int8"})])


def save_draft(source: Path, folder: Path) -> str:
    """Save a model that often agrees with that in `source`: the same weights with some noise."""
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() > 1:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor.add_((0.04 * noise).to(tensor.dtype))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def draft_of(checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> GetDraft:
    """Return what makes a draft of a model by its name."""

    def make(name: str) -> str:
        source = demo_model_path() if name.startswith("demo") else checkpoint(name.partition(" ")[0]).folder
        return save_draft(source, tmp_path_factory.mktemp("draft"))

    return make


def always(model: str, count: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": count, "adaptive": False}


def drafts_of(outputs: list[RequestOutput]) -> tuple[int, int]:
    """Return how many drafts were verified, and accepted."""
    metrics = [output.metrics for output in outputs]
    return sum(each.num_drafts for each in metrics), sum(each.num_accepted_drafts for each in metrics)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: " ".join([model[0], *map(str, model[1].values())]))
def model(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    chosen: tuple[str, dict[str, Any]] = request.param
    return chosen


@pytest.fixture(scope="module")
def draft(model: tuple[str, dict[str, Any]], draft_of: GetDraft) -> str:
    return draft_of(model[0])


@pytest.fixture(scope="module")
def alone(model: tuple[str, dict[str, Any]], checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, model[0], **model[1]) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 18}, id="chunked", marks=pytest.mark.full),
        pytest.param({"num_kv_blocks": MAX_LEN // BLOCK_SIZE}, id="preempted", marks=pytest.mark.full),
        pytest.param(
            {"max_num_batched_tokens": 18, "num_kv_blocks": MAX_LEN // BLOCK_SIZE},
            id="chunked and preempted",
            marks=pytest.mark.full,  # by default test_eagle3.py is, and stages below
        ),
        pytest.param({"enforce_eager": True}, id="op by op", marks=pytest.mark.full),
    ],
)
def test_answers_are_those_without_drafts(
    model: tuple[str, dict[str, Any]], draft: str, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM
) -> None:
    llm = make_llm(model[0], **model[1], **options, speculative_config=always(draft))
    first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(first) == alone
    num_drafts, num_accepted = drafts_of(first)
    assert num_drafts > num_accepted > num_drafts // 4
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # prefixes are in the cache, for the draft model too
    assert answers(again) == alone
    assert sum(output.metrics.num_cached_tokens for output in again) > 0 or "num_kv_blocks" in options
    if RUNS_ALL or (not options and model == MODELS[0]):
        assert one_by_one(llm) == alone


@pytest.mark.parametrize("name", NAMES[: pick(1, 2)])
def test_a_model_that_drafts_for_itself_is_always_right(
    name: str, make_llm: MakeLLM, checkpoint: GetCheckpoint
) -> None:
    """Drafts have the noise of their position, penalties and bans, and keys and values, also of cached prefixes."""
    llm = make_llm(name, speculative_config=always(str(checkpoint(name).folder), 4), max_num_batched_tokens=40)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        whole = [output for output in outputs if output.outputs[0].finish_reason == "length"]  # drafts go past a stop
        num_drafts, num_accepted = drafts_of(whole)
        assert num_accepted == num_drafts > 50
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=1, speculative=False)
    [plain] = llm.generate(random_prompt(23, seed=9), params, use_tqdm=False)
    assert plain.metrics.num_drafts == 0
    assert plain.tokens_per_step == 1.0
    longer: Prompt = {"prompt_token_ids": plain.prompt_token_ids + plain.outputs[0].token_ids}
    [late] = llm.generate(longer, params.replace(speculative=True), use_tqdm=False)
    assert late.metrics.num_cached_tokens > 20
    assert late.metrics.num_drafts > 4
    if name == "llama":  # elsewhere, what the draft model has missed is behind the windows now
        assert late.metrics.num_accepted_drafts == late.metrics.num_drafts
        assert late.tokens_per_step == 9 / 3  # 1, 5 and 3


def test_adaptive_drafts(make_llm: MakeLLM, draft: str, model: tuple[str, dict[str, Any]], alone: list[Any]) -> None:
    config = {"model": draft, "num_speculative_tokens": 5}
    llm = make_llm(model[0], **model[1], speculative_config=config, max_num_batched_tokens=24)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


def test_another_architecture_and_a_shorter_context(
    make_llm: MakeLLM, checkpoint: GetCheckpoint, tmp_path: Path
) -> None:
    """A draft model that is always wrong, and does not know positions beyond 30."""
    [case] = [case for case in TINY_MODELS if case.name == "qwen2"]
    replace(case, settings={**case.settings, "max_position_embeddings": 30}).save(tmp_path)
    with open_llm(checkpoint, "llama") as llm:
        expected = one_by_one(llm)
    llm = make_llm("llama", speculative_config=always(str(tmp_path)))
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(outputs) == expected
    assert [len(output.prompt_token_ids) > 30 for output in outputs] == [
        output.metrics.num_drafts == 0 for output in outputs
    ]


@pytest.mark.parametrize("num_stages", pick([2], [1, 2]))
def test_constraints(num_stages: int, make_llm: MakeLLM, draft_of: GetDraft) -> None:
    """Greedy requests under a grammar verify drafts too, and all of them take the tokens that the grammar forces."""
    params = mixed_params()[::5]
    prompts = [PROMPT] * len(params)
    plain = make_llm("demo", max_model_len=512)
    expected = answers(plain.generate(prompts, params, use_tqdm=False))
    llm = make_llm(
        "demo", max_model_len=512, speculative_config=always(draft_of("demo")), pipeline_parallel_size=num_stages
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert answers(outputs) == expected
    constrained = [output for output, each in zip(outputs, params, strict=True) if each.structured_output is not None]
    assert drafts_of(constrained)[1] > len(constrained)


def test_samples_under_a_grammar(make_llm: MakeLLM) -> None:
    """Without filters, samples are drafted for as well, and a model that drafts for itself knows their noise."""
    some_words = StructuredOutput(regex="([A-Za-z]+ ){4,12}")
    sampled = SamplingParams(seed=3, max_tokens=pick(30, 90), structured_output=some_words)
    params = [
        sampled,
        sampled.replace(temperature=0.6, logprobs=2),
        sampled.replace(top_p=0.9),
        sampled.replace(top_k=9),
    ]
    prompts = [PROMPT] * len(params)
    expected = answers(make_llm("demo").generate(prompts, params, use_tqdm=False))
    llm = make_llm("demo", speculative_config=always(str(demo_model_path())))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert answers(outputs) == expected
    assert [drafts_of([output])[1] > 2 for output in outputs] == [True, True, False, False]


def test_stages_and_shards(make_llm: MakeLLM, checkpoint: GetCheckpoint, draft_of: GetDraft) -> None:
    """Every rank draws the same drafts."""
    name = "qwen3-mixed-windows"
    speculative = {"speculative_config": always(draft_of(name)), "num_kv_blocks": 24, "max_num_batched_tokens": 14}
    for degree in ("pipeline_parallel_size", *pick((), ("tensor_parallel_size",))):  # shards: see the next test
        alike = {} if degree == "pipeline_parallel_size" else {degree: 2}  # stages have the bytes of one rank
        with open_llm(checkpoint, name, **alike) as llm:
            expected = one_by_one(llm)
        llm = make_llm(name, **{degree: 2}, **speculative)
        for _ in range(pick(1, 2)):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert answers(outputs) == expected
            num_drafts, num_accepted = drafts_of(outputs)
            assert num_drafts > num_accepted > num_drafts // 8


@pytest.mark.parametrize("name", pick(["qwen2-moe-windows"], ["qwen2-moe-windows", "demo in bfloat16"]))
def test_ranks_in_processes(name: str, make_llm: MakeLLM, draft_of: GetDraft) -> None:
    """Ranks that share every layer, experts whole if there are any."""
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": "moe" in name}
    prompts, params = PROMPTS[::3], PARAMS[::3]
    expected = answers(make_llm(name, **options).generate(prompts, params, use_tqdm=False))
    llm = make_llm(name, **options, speculative_config=always(draft_of(name)), num_kv_blocks=MAX_LEN // BLOCK_SIZE)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert answers(outputs) == expected
    assert drafts_of(outputs)[1] > 3


@pytest.mark.full  # by default test_eagle3.py has one with drafts of ranks
@pytest.mark.parametrize(("seed", "num_stages"), [(0, 1), (2, 1), (3, 2), (4, 2)])
def test_a_storm(seed: int, num_stages: int, checkpoint: GetCheckpoint, draft_of: GetDraft) -> None:
    """Aborts, preemptions, stop strings, minimum lengths and prompt logprobs, at any moment."""
    config = always(draft_of("qwen3-mixed-windows"))
    weather_storm(seed, checkpoint, pipeline_parallel_size=num_stages, speculative_config=config)


def test_models_that_do_not_fit_together(make_llm: MakeLLM, checkpoint: GetCheckpoint) -> None:
    with pytest.raises(InvalidParameterError, match=r"not the same tokenizer: .* tokens differ; id") as caught:
        LLM("demo", speculative_config={"model": "smollm2"})
    assert caught.value.field == "speculative_config"
    with pytest.raises(ModelNotFoundError, match="speculative_config: model: '/nowhere': there is no such folder"):
        LLM("demo", speculative_config={"model": "/nowhere"})
    with pytest.raises(InvalidParameterError, match="it has no tokenizer, and a vocabulary of 97 tokens, but demo has"):
        LLM("demo", speculative_config={"model": str(checkpoint("llama").folder)})
    with pytest.raises(UnsupportedModelError, match="attends to 64 tokens, but the model keeps only sliding windows"):
        make_llm("mistral-window", speculative_config=always(str(checkpoint("llama").folder)))
