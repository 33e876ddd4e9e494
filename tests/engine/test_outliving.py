"""Requests outlive the engine: real processes, real signals, and the answers of an engine that nobody disturbs."""

import asyncio
import itertools
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from tests import fakes
from tests.breadth import pick
from tests.fakes.core import HUGE, POISON

from octavo.async_llm import AsyncLLM
from octavo.contracts.engine import SchedulerStats
from octavo.engine import process_client
from octavo.engine.process_client import ProcessClient
from octavo.errors import EngineDeadError
from octavo.inputs import Prompt
from octavo.llm import LLM
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {"num_kv_blocks": 512, "max_num_seqs": 16, "dtype": "float32", "seed": 1}


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessClient, "command", fakes.FAKE_CORE)


class Disturbed:
    """An engine, and the processes of its cores."""

    def __init__(self, llm: AsyncLLM, client: ProcessClient) -> None:
        self.llm, self.client = llm, client

    async def answers(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[list[CompletionOutput]]:
        async def one(prompt: Prompt, of_one: SamplingParams) -> list[CompletionOutput]:
            parts: list[RequestOutput] = [output async for output in self.llm.stream(prompt, of_one)]
            for before, after in itertools.pairwise(parts):
                assert all(
                    new.text.startswith(old.text) for old, new in zip(before.outputs, after.outputs, strict=True)
                )
            return parts[-1].outputs

        return await asyncio.gather(*[one(*each) for each in zip(prompts, params, strict=True)])

    def signal(self, number: int, replica: int = 0) -> None:
        os.kill(self.client.pids[replica], number)

    async def until(self, num_tokens: int) -> None:
        """Wait until so many tokens have been computed since the start."""
        metrics = (await self.llm.engine()).metrics
        while metrics.num_generation_tokens < num_tokens:
            await asyncio.sleep(0.01)

    async def stats(self) -> dict[int, SchedulerStats]:
        """Return those of each replica, once every one has a core that has said something."""
        metrics = (await self.llm.engine()).metrics
        while not metrics.stats_by_replica or any(not each.num_blocks for each in metrics.stats_by_replica.values()):
            await asyncio.sleep(0.01)
        return metrics.stats_by_replica

    async def kill(self, replica: int = 0) -> None:
        """Kill a core once all are ready, and wait until that has been noticed: what it had sent comes before."""
        metrics = (await self.llm.engine()).metrics
        while self.client.outages:
            await asyncio.sleep(0.01)
        num_deaths = metrics.num_core_deaths
        self.signal(signal.SIGKILL, replica)
        while metrics.num_core_deaths == num_deaths:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[Disturbed]:
    """Start one; check in the end that nothing is left of it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    num_files = psutil.Process().num_fds()
    async with AsyncLLM("demo", **{**OPTIONS, **options}) as llm:
        client = (await llm.engine()).front.client
        assert isinstance(client, ProcessClient)
        yield Disturbed(llm, client)
        await (await llm.engine()).call("check_integrity")
        assert not client._supervisor._by_id
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left
    assert psutil.Process().num_fds() <= num_files + 8  # of the event loop, and of what imports keep


def mixed(count: int, max_tokens: int = 200) -> tuple[list[Prompt], list[SamplingParams]]:
    """Return requests of the kinds that a fake model knows; tests/chaos/storm.py has the others."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"n": 2, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 30},
        {"stop": ["e", "q5"], "ignore_eos": False, "include_stop_str_in_output": True},
    ]
    params = [
        SamplingParams(**{"max_tokens": max_tokens + at, "ignore_eos": True, "seed": at, **kinds[at % len(kinds)]})
        for at in range(count)
    ]
    return [f"Say {at}" for at in range(count)], params


async def test_streams_under_kills_are_those_of_an_undisturbed_engine() -> None:
    prompts, params = mixed(12, 100)
    async with engine() as one:
        expected = await one.answers(prompts, params)
        answers = asyncio.create_task(one.answers(prompts, params))
        num_tokens = sum(len(sample.token_ids) for samples in expected for sample in samples)
        for part in (1.2, 1.5):
            await one.until(int(num_tokens * part))
            await one.kill()
        assert await answers == expected
        metrics = (await one.llm.engine()).metrics
        assert metrics.num_core_deaths == 2
        # None twice; after a stop string some, until the core hears of it.
        num_after_stop = sum(
            each.max_tokens - len(samples[0].token_ids)
            for each, samples in zip(params, expected, strict=True)
            if each.stop and each.max_tokens
        )
        assert 0 <= metrics.num_generation_tokens - 2 * num_tokens <= 2 * num_after_stop < num_tokens // 2
        stats = (await one.stats())[0]
        assert stats.num_blocks == 512
        assert stats.num_running == stats.num_waiting == 0


@pytest.mark.full  # by default test_data_parallel.py kills one of two in the middle of streams
async def test_with_replicas_the_others_take_over() -> None:
    prompts, params = mixed(12, 150)
    async with engine(data_parallel_size=2) as one:
        expected = await one.answers(prompts, params)
        answers = asyncio.create_task(one.answers(prompts, params))
        num_tokens = sum(len(sample.token_ids) for samples in expected for sample in samples)
        for replica, part in enumerate((1.2, 1.5)):
            await one.until(int(num_tokens * part))
            await one.kill(replica)
        assert await answers == expected
        assert {replica: each.num_blocks for replica, each in (await one.stats()).items()} == {0: 512, 1: 512}


@pytest.mark.parametrize(
    ("token", "death"),
    pick(
        [(POISON, "the engine process ended (killed by signal 9)")],
        [(POISON, "the engine process ended (killed by signal 9)"), (HUGE, "MemoryError: 78 of 77 GiB")],
    ),
)
async def test_what_kills_fails_alone_with_a_reason(token: int, death: str) -> None:
    prompts, params = mixed(pick(4, 8), 60)
    async with engine() as one:
        expected = await one.answers(prompts, params)
        answers = asyncio.create_task(one.answers(prompts, params))
        poison = await one.llm.generate({"prompt_token_ids": [token, 5]}, SamplingParams(max_tokens=5))
        assert poison.outputs[0].finish_reason == "error"
        assert "while it ran this request, at last alone: " in (poison.outputs[0].error or "")
        assert death in (poison.outputs[0].error or "")
        assert poison.outputs[0].error_type == "RequestError"
        assert await answers == expected


async def test_one_that_is_stuck_is_replaced() -> None:
    prompts, params = mixed(4)
    async with engine(stall_timeout_s=2.0) as one:
        expected = await one.answers(prompts, params)
        await asyncio.sleep(2.5)  # silence without requests is none
        assert await one.answers(prompts, params) == expected
        assert (await one.llm.engine()).metrics.num_core_deaths == 0
        answers = asyncio.create_task(one.answers(prompts, params))
        await one.until((await one.llm.engine()).metrics.num_generation_tokens + 50)
        one.signal(signal.SIGSTOP)
        assert await answers == expected
        assert (await one.llm.engine()).metrics.num_core_deaths == 1


async def test_the_one_that_stands_by_takes_over() -> None:
    prompts, params = mixed(4)
    async with engine(hot_standby=True) as one:
        expected = await one.answers(prompts, params)
        for _ in range(pick(1, 2)):
            while one.client._standby is None or one.client._standby.ready is None:
                await asyncio.sleep(0.05)
            standby = one.client._standby.child.pid
            answers = asyncio.create_task(one.answers(prompts, params))
            await one.until((await one.llm.engine()).metrics.num_generation_tokens + 50)
            one.signal(signal.SIGKILL)
            assert await answers == expected
            assert one.client.pids == [standby]


async def test_a_spare_process_becomes_the_next_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "_SPARE_PAUSE_S", 0.0)
    monkeypatch.setattr(process_client, "_STANDBY_PAUSE_S", 0.0)
    prompts, params = mixed(4)
    async with engine() as one:
        expected = await one.answers(prompts, params)
        for _ in range(pick(1, 2)):
            while one.client._standby is None:
                await asyncio.sleep(0.05)
            spare = one.client._standby.child
            answers = asyncio.create_task(one.answers(prompts, params))
            await one.until((await one.llm.engine()).metrics.num_generation_tokens + 50)
            one.signal(signal.SIGKILL)
            assert await answers == expected
            assert one.client.pids == [spare.pid]
        while one.client._standby is None:
            await asyncio.sleep(0.05)
        one.client._standby.child.kill()  # nobody misses it
        assert await one.answers(prompts, params) == expected
        assert (await one.llm.engine()).metrics.num_core_deaths == pick(1, 2)


async def test_programs_that_answer_a_batch_keep_no_spare_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "_SPARE_PAUSE_S", 0.0)
    with LLM("demo", engine_process=True, **OPTIONS) as llm:
        llm.generate("Hi", SamplingParams(max_tokens=40), use_tqdm=False)
        client = llm.engine.front.client
        assert isinstance(client, ProcessClient)
        assert client._standby_due_s == math.inf


async def test_calls_and_new_requests_wait_for_the_next_core() -> None:
    async with engine() as one:
        [before] = await one.answers(["Hi"], [SamplingParams(max_tokens=20, seed=2)])
        one.signal(signal.SIGKILL)
        assert await (await one.llm.engine()).call("has_work") == [False]
        one.signal(signal.SIGKILL)
        stream = one.llm.stream("Never", SamplingParams(max_tokens=500, ignore_eos=True))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        waiting.cancel()  # while it waits for a core, or has just got one
        assert await one.answers(["Hi"], [SamplingParams(max_tokens=20, seed=2)]) == [before]


async def test_cores_that_cannot_even_begin_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM("demo", max_restarts=2, **OPTIONS) as llm:
        client = (await llm.engine()).front.client
        assert isinstance(client, ProcessClient)
        monkeypatch.setattr(ProcessClient, "command", [sys.executable, "-c", "raise SystemExit(3)"])
        os.kill(client.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code 3"):
            await llm.generate("Hi", SamplingParams(max_tokens=500, ignore_eos=True))
        assert client.outages.keys() == {0}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"hot_standby": True}])
async def test_a_storm_of_kills(options: dict[str, Any]) -> None:
    """Cores, and of several ranks any rank, at random moments."""
    prompts, params = mixed(60, 400)
    rng = random.Random(json.dumps(options))
    async with engine(max_restarts=1000, **options) as one:  # a kill every few seconds may come before it has started
        expected = await one.answers(prompts, params)
        answers = asyncio.create_task(one.answers(prompts, params))
        end_s = time.monotonic() + 60.0
        while not answers.done() and time.monotonic() < end_s:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            if victims := psutil.Process().children(recursive=True):  # none while the next one starts
                rng.choice(victims).send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV]))
        assert await answers == expected
