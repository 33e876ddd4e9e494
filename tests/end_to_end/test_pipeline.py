"""A model in stages gives the bytes of the whole model, whatever happens while several steps are in flight.

Ranks are threads here, which leaves nothing out but processes: those are in tests/executor.
"""

import threading
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.end_to_end.test_greedy import GREEDY, assert_greedy
from tests.end_to_end.test_greedy import PROMPTS as GREEDY_PROMPTS
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.end_to_end.test_storm import weather_storm
from tests.end_to_end.test_structured import PROMPT, mixed_params
from tests.models.tiny import TINY_MODELS
from tests.worker.threaded_ranks import ThreadedRanks

from octavo.config.engine import EngineConfig
from octavo.executor.base import make_executor
from octavo.kernels.dispatch import native_kernels
from octavo.models.interfaces import CausalLM
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.graph import StepGraph
from octavo.worker.request_rows import RequestRows

MODELS = ["llama", "qwen3-tied-gqa-8", "qwen3-mixed-windows", "demo"]
if native_kernels() is not None:
    MODELS += ["demo in bfloat16", "qwen3-mixed-windows in bfloat16"]
MODELS = pick(MODELS[-1:], MODELS)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[ThreadedRanks]:
    """Let engines of several stages run on threads; they are listed here as they are made."""
    made: list[ThreadedRanks] = []

    def make(config: EngineConfig) -> Any:
        if config.parallel.world_size == 1:
            return make_executor(config)
        made.append(ThreadedRanks(config))
        return made[-1]

    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", make)
    return made


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str, checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize("num_stages", pick([3], [2, 3]))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked", marks=pytest.mark.full),
        pytest.param({"num_kv_blocks": 24}, id="preempted", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14, "num_kv_blocks": 24}, id="chunked and preempted"),
    ],
)
def test_stages_give_the_bytes_of_one_rank(
    name: str, num_stages: int, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM, ranks: list[ThreadedRanks]
) -> None:
    llm = make_llm(name, pipeline_parallel_size=num_stages, **options)
    for _ in range(2):  # the second time, prefixes are in the cache
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert ranks[0].max_num_in_flight == num_stages


@pytest.mark.parametrize("name", [case.name for case in TINY_MODELS[:: pick(22, 1)]])
def test_greedy_is_that_of_transformers(name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    llm = make_llm(name, pipeline_parallel_size=3)
    assert_greedy(checkpoint(name).reference, llm.generate(GREEDY_PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.full  # by default test_drafts.py has one in stages
@pytest.mark.parametrize(("seed", "num_stages"), [(0, 2), (1, 3), (2, 3)])
def test_a_storm(seed: int, num_stages: int, checkpoint: GetCheckpoint) -> None:
    """Aborts, preemptions, stop strings and prompt logprobs, at any moment of a pipeline."""
    weather_storm(seed, checkpoint, pipeline_parallel_size=num_stages)


def test_prompt_logprobs_come_from_the_last_stage(make_llm: MakeLLM) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, seed=1, ignore_eos=True)
    outputs = [
        answers(make_llm("qwen3", max_num_batched_tokens=9, **stages).generate(PROMPTS, params, use_tqdm=False))
        for stages in ({}, {"pipeline_parallel_size": 3})
    ]
    assert outputs[0] == outputs[1]


def test_answers_under_a_grammar(make_llm: MakeLLM) -> None:
    """A row under a grammar needs the mask that its last token made; others decode beside it."""
    params = mixed_params()[::5]
    prompts = [PROMPT] * len(params)
    outputs = [
        answers(make_llm("demo", max_model_len=512, **stages).generate(prompts, params, use_tqdm=False))
        for stages in ({}, {"pipeline_parallel_size": 2})
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("stage", pick([1], [0, 1, 2]))
@pytest.mark.parametrize("work", pick(["run_stage"], ["forward_batch", "run_stage"]))
def test_a_step_that_fails_on_one_stage_ends_its_own_requests_only(
    stage: int, work: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a stage takes what the one before has sent, and behind."""
    llm = make_llm("qwen3", pipeline_parallel_size=3)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [random_prompt(7, seed=seed) for seed in range(8)]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    ids = [llm.engine.add_request(prompt, params) for prompt in prompts]
    for _ in range(6):
        llm.engine.step()
    fail_once(work, f"rank-{stage}", 11, monkeypatch)
    sick = llm.engine.add_request({"prompt_token_ids": list(range(3, 14))}, params)
    last: dict[str, CompletionOutput] = {}
    while llm.engine.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in llm.engine.step()[0]}
    failed = {request_id for request_id, output in last.items() if output.finish_reason == "error"}
    assert sick in failed
    words = "ValueError: bad luck" if stage == 2 else f"stage {stage}: ValueError: bad luck"
    assert all(words in str(last[request_id].error) for request_id in failed)
    assert 5 <= len(set(ids) - failed) < 8  # a few had tokens in that very step
    for request_id, token_ids in zip(ids, alone, strict=True):
        assert request_id in failed or last[request_id].token_ids == token_ids
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == alone


def fail_once(work: str, thread: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank raise, at its next step of at least so many tokens."""
    bad_luck = ["here"]

    def watch(owner: Any, name: str) -> None:
        do = getattr(owner, name)

        def do_or_fail(*arguments: Any, **options: Any) -> Any:
            order: Any = arguments[1] if owner is RequestRows else None
            count = order.total_num_scheduled_tokens if order is not None else len(arguments[1].input_ids)
            if threading.current_thread().name.startswith(thread) and count >= num_tokens and bad_luck:
                bad_luck.pop()
                raise ValueError("bad luck")
            return do(*arguments, **options)

        monkeypatch.setattr(owner, name, do_or_fail)

    if work == "run_stage":
        watch(CausalLM, "run_stage")
        watch(StepGraph, "run")  # in its place, where steps are recorded
    else:
        watch(RequestRows, work)
