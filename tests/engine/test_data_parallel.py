"""Replicas behind one client: real processes, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tests import fakes
from tests.breadth import pick
from tests.engine.interrupts import endure
from tests.executor.processes import are_gone

from octavo.async_llm import AsyncLLM
from octavo.engine.child_core import ChildCore
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.process_client import ProcessClient
from octavo.errors import EngineDeadError, InsufficientMemoryError, InvalidParameterError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=pick(None, 1))  # a fake core has none
OPTIONS: dict[str, Any] = {"num_kv_blocks": 128, "max_num_seqs": 8, "dtype": "float32", "data_parallel_size": 2}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessClient, "command", fakes.CORE)
        engine = LLMEngine("demo", **OPTIONS)
    yield engine
    engine.exit()


def client_of(engine: LLMEngine) -> ProcessClient:
    client = engine.front.client
    assert isinstance(client, ProcessClient)
    return client


def test_answers_are_those_of_one_core_and_both_replicas_gave_some(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"What is {number} + {number}?" for number in range(12)]
    monkeypatch.setattr(ProcessClient, "command", fakes.CORE)
    alone = LLMEngine("demo", engine_process=True, **{**OPTIONS, "data_parallel_size": 1})
    assert [out.outputs for out in engine.generate(prompts, PARAMS)] == [
        out.outputs for out in alone.generate(prompts, PARAMS)
    ]
    alone.exit()
    stats = engine.front.outputs.metrics.stats_by_replica
    assert stats.keys() == {0, 1}
    assert engine.front.outputs.metrics.stats is not None
    assert engine.front.outputs.metrics.stats.num_blocks == 256
    assert all(one.num_prefix_queries_total > 0 for one in stats.values())


def test_a_conversation_goes_back_to_the_blocks_of_its_beginning(engine: LLMEngine) -> None:
    beginnings = [[{"role": "user", "content": f"Question {number}: " + "what is a block? " * 12}] for number in (1, 2)]
    first = [engine.generate(engine.chat_prompt(chat), PARAMS)[0] for chat in beginnings]
    again = [engine.generate(engine.chat_prompt(chat), PARAMS)[0] for chat in reversed(beginnings)]
    assert [out.metrics.num_cached_tokens for out in first] == [0, 0]
    assert all(out.metrics.num_cached_tokens >= 64 for out in again)


def test_calls_and_aborts_reach_every_replica(engine: LLMEngine) -> None:
    for number in range(4):
        engine.add_request("Hello", LONG, request_id=f"r{number}")
    for number in range(4):
        engine.abort_request(f"r{number}")
    ended: dict[str, RequestOutput] = {}
    while len(ended) < 4:
        ended.update({out.request_id: out for out in engine.step()[0] if out.finished})
    assert {out.outputs[0].finish_reason for out in ended.values()} == {"abort"}
    engine.reset_prefix_cache()
    engine.check_integrity()


def test_interrupts_at_random_moments(engine: LLMEngine) -> None:
    endure(engine, [f"Tell {number}" for number in range(6)], PARAMS, times=12)


def test_nothing_is_left_at_exit(engine: LLMEngine) -> None:
    """The last test with this engine."""
    replicas = client_of(engine)
    engine.exit()
    assert are_gone(replicas.pids)


def test_a_program_may_end_without_exit() -> None:
    code = (
        "from octavo import LLM; from octavo.engine.process_client import ProcessClient;"
        f"ProcessClient.command = {fakes.CORE}; llm = LLM('demo', data_parallel_size=2, num_kv_blocks=64);"
        "print(*llm.engine.front.client.pids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert are_gone(map(int, done.stdout.split()))


async def test_without_restarts_the_last_death_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessClient, "command", fakes.CORE)
    async with AsyncLLM("demo", max_restarts=0, **OPTIONS) as llm:
        loaded = await llm.engine()
        client = loaded.front.client
        assert isinstance(client, ProcessClient)
        tasks = [asyncio.create_task(llm.generate(f"Tell {number}", LONG)) for number in range(4)]
        while loaded.metrics.num_generation_tokens < 100:
            await asyncio.sleep(0.01)
        os.kill(client.pids[1], signal.SIGKILL)
        while loaded.metrics.stats_by_replica[1].num_blocks:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)  # all go on in the other one
        os.kill(client.pids[0], signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match=r"all replicas are gone: replica 0: .*; replica 1: "):
                await task


@pytest.mark.full
def test_one_that_cannot_start_lets_the_others_go() -> None:
    with pytest.raises(InsufficientMemoryError, match="max_model_len"):
        LLM("demo", data_parallel_size=2, num_kv_blocks=1)


def test_one_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ChildCore] = []

    def start_one(*args: Any, **options: Any) -> ChildCore:
        if started:
            raise OSError("no more processes")
        started.append(ChildCore(*args, **options))
        return started[0]

    monkeypatch.setattr("octavo.engine.process_client.ChildCore", start_one)
    with pytest.raises(EngineDeadError, match="could not be started: no more processes"):
        LLMEngine("demo", **OPTIONS)
    assert not psutil.pid_exists(started[0].child.pid)


def test_replicas_are_processes() -> None:
    with pytest.raises(InvalidParameterError, match="engine_process=False: true or unset"):
        LLM("demo", data_parallel_size=2, engine_process=False)
