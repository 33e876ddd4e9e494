"""`AsyncLLMEngine`: many tasks on one engine, readers that are slow, leave early or are cancelled."""

import asyncio
import faulthandler
import gc
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from tests.engine.conftest import FAILURES

from octavo.async_llm import AsyncLLM
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import EngineDeadError, EventLoopError, InvalidParameterError, PromptTooLongError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.testing import FakeExecutor
from octavo.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def engine(fake_executors: list[FakeExecutor]) -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine("demo", block_size=4)
    yield engine
    engine.exit()


def params(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def all_blocks_free(engine: AsyncLLMEngine) -> None:
    """Return when the core holds nothing any more, and find it intact."""
    while len(engine.front.outputs):
        await asyncio.sleep(0.01)
    await engine.call("check_integrity")


async def test_generate_async_answers_in_the_order_of_the_prompts(engine: AsyncLLMEngine) -> None:
    outputs = await engine.generate_async(["Hello", "World"], [params(7), params(3)])
    assert [output.prompt for output in outputs] == ["Hello", "World"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 3]
    (single,) = await engine.generate_async("Hello", params(7))
    assert single.outputs[0].token_ids == outputs[0].outputs[0].token_ids


async def test_streams_grow_and_end_with_the_whole_answer(engine: AsyncLLMEngine) -> None:
    streams = [collect(engine.stream(f"prompt {index}", params(20, seed=index))) for index in range(20)]
    for index, outputs in enumerate(await asyncio.gather(*streams)):
        texts = [output.text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        alone = await engine.generate(f"prompt {index}", params(20, seed=index))
        assert alone.text == texts[-1]


async def test_a_slow_reader_gets_several_steps_at_once(engine: AsyncLLMEngine) -> None:
    stream = engine.stream("Hi", params(1500))
    await anext(stream)
    while len(engine.front.outputs):  # the engine goes on meanwhile, and ends
        await asyncio.sleep(0.01)
    (rest,) = await collect(stream)
    assert len(rest.outputs[0].token_ids) == 1500


async def test_a_reader_that_leaves_frees_everything(engine: AsyncLLMEngine) -> None:
    stream = engine.stream("Hi", params(1500))
    await anext(stream)
    await stream.aclose()
    await all_blocks_free(engine)


async def test_a_cancelled_task_frees_everything(engine: AsyncLLMEngine) -> None:
    tasks = [asyncio.create_task(engine.generate("Hi", params(1500, seed=seed))) for seed in range(4)]
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await all_blocks_free(engine)


async def test_abort_ends_a_stream_with_what_there_is(engine: AsyncLLMEngine) -> None:
    stream = engine.stream("Hi", params(1500), request_id="mine")
    await anext(stream)
    await engine.abort_request("mine")
    outputs = await collect(stream)
    assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_bad_requests_are_refused_before_anything_starts(engine: AsyncLLMEngine) -> None:
    with pytest.raises(InvalidParameterError, match="prompt_token_ids"):
        await engine.generate_async(["fine", {"prompt_token_ids": [-1]}])
    assert len(engine.front.outputs) == 0


async def test_long_prompts_are_tokenized_outside_the_event_loop(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def noting(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    text = "ab " * 3000
    for request in (
        engine.generate(text),
        engine.generate({"prompt": text}),
        engine.generate_async([text[:6000]] * 2),
        anext(engine.stream(text)),
        engine.chat_prompt([{"role": "user", "content": text}]),
    ):
        with suppress(PromptTooLongError):
            await request
    assert len(threads) == 6
    assert threading.current_thread() not in threads
    together = threading.Barrier(2)
    monkeypatch.setattr(Tokenizer, "encode", lambda *given: together.wait() >= 0 and encode(*given))
    both = [engine.generate(" detokenizer" * 1000, params(100), request_id="mine") for _ in range(2)]
    done = await asyncio.gather(*both, return_exceptions=True)
    assert [isinstance(each, InvalidParameterError) for each in done].count(True) == 1  # the id is taken
    monkeypatch.setattr(Tokenizer, "encode", noting)
    await engine.generate("short", params(1))
    assert threads[-1] is threading.current_thread()


async def test_a_failed_forward_reaches_its_reader_and_nobody_else(engine: AsyncLLMEngine) -> None:
    FAILURES.append(lambda order: bool(order.req_ids))
    doomed = await engine.generate("Hi", params(5), request_id="doomed")
    FAILURES.clear()
    assert (doomed.outputs[0].finish_reason, len(doomed.outputs[0].token_ids)) == ("error", 0)
    assert (await engine.generate("Hi", params(5))).outputs[0].finish_reason == "length"


async def test_exit_tells_those_who_wait(engine: AsyncLLMEngine) -> None:
    waiting = asyncio.create_task(engine.generate("Hi", params(1500)))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(engine.exit)
    with pytest.raises(EngineDeadError, match="closed"):
        await waiting


async def test_an_id_is_free_when_its_request_has_ended_for_the_caller(engine: AsyncLLMEngine) -> None:
    """By a stop string, a reader that leaves, an abort: the core hears of each later, and mixes nothing up."""
    plain = await engine.generate("Hi", params(60))
    stopping = params(60).replace(stop=[plain.text[10:13]])
    expected = await engine.generate("Hi", stopping)
    for _ in range(4):
        outputs = await collect(engine.stream("Hi", stopping, request_id="job-7"))
        assert outputs[-1].outputs == expected.outputs
    for _ in range(4):
        stream = engine.stream("Hi", params(1500), request_id="job-7")
        await anext(stream)
        await stream.aclose()
    for _ in range(4):
        async for _ in engine.stream("Hi", params(1500), request_id="job-7"):
            break
    aborted = engine.stream("Hi", params(1500), request_id="job-7")
    await anext(aborted)
    await engine.abort_request("job-7")
    assert (await engine.generate("Hi", params(60), request_id="job-7")).outputs == plain.outputs
    assert (await collect(aborted))[-1].outputs[0].finish_reason == "abort"
    await all_blocks_free(engine)


async def test_a_request_that_is_cancelled_before_its_first_turn_is_aborted(engine: AsyncLLMEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.generate_async(["Hi"] * 8, params(1500))
    started = list(engine.front.outputs._requests)
    assert not engine._readers
    await all_blocks_free(engine)
    assert {state.samples[0].finish_reason for state in started} == {"abort"}


def test_a_second_event_loop_goes_on_where_the_first_has_ended(fake_executors: list[FakeExecutor]) -> None:
    """Whatever the first leaves behind: here a stream in a loop that is closed under it."""
    llm = AsyncLLM("demo", engine_process=False, block_size=4)
    first = asyncio.new_event_loop()
    stream = llm.stream("Hi", params(1500))
    first.run_until_complete(anext(stream))
    with pytest.raises(EventLoopError, match="in use by another event loop"):
        asyncio.run(llm.generate("Hi", params(5)))
    first.close()

    async def go_on() -> str:
        output = await llm.generate("Hi", params(5))
        await all_blocks_free(await llm.engine())
        return output.text

    assert asyncio.run(go_on()) == asyncio.run(go_on())
    asyncio.run(llm.exit())
    assert fake_executors[0].has_exited


async def test_two_running_loops_are_refused_at_once(engine: AsyncLLMEngine) -> None:
    await engine.generate("Hi", params(1))
    with pytest.raises(EventLoopError, match="run_coroutine_threadsafe"):
        await asyncio.to_thread(asyncio.run, engine.generate("Hi", params(1)))


async def test_a_task_that_stops_waiting_for_the_load_takes_it_from_nobody(fake_executors: list[FakeExecutor]) -> None:
    llm = AsyncLLM("demo", engine_process=False, block_size=4)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await llm.generate("Hi", params(1))
    assert (await llm.generate("Hi", params(1))).finished
    assert len(fake_executors) == 1
    await llm.exit()


def test_a_forked_process_gets_errors_and_ends(fake_executors: list[FakeExecutor]) -> None:
    """The engine's thread does not exist there: nothing may wait for it, not even the interpreter's end."""
    engine = AsyncLLMEngine("demo")
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(20.0, exit=True)  # status 1
        with suppress(BaseException):
            with pytest.raises(RuntimeError, match="forked"):
                asyncio.run(engine.generate("Hi"))
            with pytest.raises(RuntimeError, match="forked"):
                asyncio.run(engine.call("reset_prefix_cache"))
            engine.exit()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert asyncio.run(engine.generate("Hi")).finished
    engine.exit()


def test_an_engine_that_is_dropped_shuts_itself_down(fake_executors: list[FakeExecutor]) -> None:
    llm = AsyncLLM("demo", engine_process=False, block_size=4)
    assert asyncio.run(llm.generate("Hi", params(5))).finished
    thread = asyncio.run(llm.engine())._pump._thread
    del llm
    gc.collect()
    thread.join(10.0)
    assert fake_executors[0].has_exited
