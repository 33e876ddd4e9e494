"""Ranks that are processes: through `LLM`, through HTTP, with a stage that fails, and one that is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import random_prompt, random_tokens
from tests.engine.interrupts import endure
from tests.executor.processes import ranks_below
from tests.executor.stages import BAD_TOKEN
from tests.server.http_server import HttpServer
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM
from octavo.config.engine import EngineConfig
from octavo.errors import EngineDeadError
from octavo.executor.multiproc import MultiprocExecutor
from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=pick(6, 12), ignore_eos=True)
PREFIX = random_tokens(30, seed=0)
PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in (1, 4, 9, 17, 33)]
PROMPTS += [{"prompt_token_ids": PREFIX[:length]} for length in (30, 29, 8)]


def greedy_tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(checkpoint: GetCheckpoint) -> list[list[int]]:
    with open_llm(checkpoint, "qwen3-tied-gqa-8") as llm:
        return greedy_tokens(llm)


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"tensor_parallel_size": 2}, id="TP 2"),
        pytest.param({"pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 3}, id="PP 3", marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, id="TP 2 x PP 2"),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(
    degrees: dict[str, Any], alone: list[list[int]], checkpoint: GetCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In little memory and in chunks, with prefixes in the cache the second time, somebody who leaves, and signals.

    In the end a rank is killed that others wait for: they do not wait for ever.
    """
    has_processes = RUNS_ALL or len(degrees) == 1
    if not has_processes:  # four processes would take as long as all of this file
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    options = {"num_kv_blocks": 30, "max_num_batched_tokens": 16, **degrees}
    with open_llm(checkpoint, "qwen3-tied-gqa-8", **options) as llm:
        assert greedy_tokens(llm) == alone
        leaving = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
        llm.engine.step()
        for request_id in leaving:
            llm.engine.abort_request(request_id)
        assert greedy_tokens(llm) == alone
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        endure(llm.engine, PROMPTS[:5], GREEDY.replace(seed=1), times=pick(5, 25))
        llm.engine.check_integrity()
        if has_processes:
            llm.engine.add_request(PROMPTS[4], GREEDY)
            llm.engine.step()
            os.kill(ranks_below(os.getpid())[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="rank 1"):
                llm.engine.step()
    assert not ranks_below(os.getpid())


@pytest.mark.full
def test_a_step_that_fails_on_the_first_stage_leaves_the_engine_alive(
    alone: list[list[int]], checkpoint: GetCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)  # ranks import a tests' worker
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", fragile)
    with open_llm(checkpoint, "qwen3-tied-gqa-8", pipeline_parallel_size=2) as llm:
        bad: Prompt = {"prompt_token_ids": [5, BAD_TOKEN, BAD_TOKEN, 5]}
        [failed] = llm.generate(bad, GREEDY, use_tqdm=False)[0].outputs
        assert failed.finish_reason == "error"
        assert "stage 0: ValueError: bad luck" in str(failed.error)
        assert greedy_tokens(llm) == alone


def fragile(config: EngineConfig) -> MultiprocExecutor:
    return MultiprocExecutor(config, "tests.executor.stages:FragileWorker")


@pytest.mark.full
def test_over_http() -> None:
    prompts = ["Octavo is", "What is a block?", "one two three"]
    body = {"model": "demo", "max_tokens": 16, "temperature": 0}
    with LLM("demo", dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    with HttpServer("--pipeline-parallel-size", "3", "--dtype", "float32") as server:
        reply = server.post("/v1/completions", {**body, "prompt": prompts})
        assert [choice["text"] for choice in reply.json()["choices"]] == expected
        streamed = server.stream("/v1/completions", {**body, "prompt": prompts[0]})
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed if chunk["choices"]) == expected[0]
