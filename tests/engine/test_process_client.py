"""The engine core in a child process: real processes, real signals."""

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from tests import fakes
from tests.engine.interrupts import endure
from tests.marks import needs_populate

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.engine.child_core import CoreSockets, relay_lines
from octavo.engine.front import read_tokenizer
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.process_client import ProcessClient
from octavo.errors import EngineDeadError, EngineError, InsufficientMemoryError, InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, logit_bias={5: 1.0}, stop=["zzz"])
LOOKUP = '{"method": "ngram", "prompt_lookup_max": 2}'
OPTIONS: dict[str, Any] = {"num_kv_blocks": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def children_while_reading() -> list[int]:
    """The processes that were there when the tokenizer of `engine` was read."""
    return []


@pytest.fixture(scope="module")
def engine(children_while_reading: list[int]) -> Iterator[LLMEngine]:
    """With more memory than its warm-up touches."""

    def read(path: str, chat_template: str | None) -> Tokenizer:
        children_while_reading.extend(child.pid for child in psutil.Process().children())
        return read_tokenizer(path, chat_template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.engine.front.read_tokenizer", read)
        options: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 1024, "block_size": 32}
        engine = LLMEngine("demo", engine_process=True, speculative_config=LOOKUP, **options)
    yield engine
    engine.exit()


def client_of(engine: LLMEngine) -> ProcessClient:
    client = engine.front.client
    assert isinstance(client, ProcessClient)
    return client


@pytest.fixture
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessClient, "command", fakes.CORE)


def wait_until_gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@needs_populate
def test_an_idle_core_prefaults_kv_memory(engine: LLMEngine) -> None:
    """The first test with this engine; the answers of the second are computed in that memory."""
    process = psutil.Process(client_of(engine).pids[0])
    token_bytes = 6 * 2 * 2 * 64 * 2  # layers, keys and values, heads, head size, bytes
    wanted = 16_384 * token_bytes // 4  # a part of it was there since the warm-up
    before, deadline = process.memory_info().rss, time.monotonic() + 60.0
    while process.memory_info().rss < before + wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.memory_info().rss >= before + wanted


def test_answers_are_those_of_a_core_in_this_process(engine: LLMEngine) -> None:
    inproc = LLMEngine("demo", **OPTIONS)
    prompts = ["Hello, world!", "What is Octavo?"]
    assert [out.outputs for out in engine.generate(prompts, PARAMS.replace(seed=1))] == [
        out.outputs for out in inproc.generate(prompts, PARAMS.replace(seed=1))
    ]
    inproc.exit()


def test_parameters_may_be_numpys(engine: LLMEngine) -> None:
    params = PARAMS.replace(temperature=np.float64(0.5), logit_bias={5: np.float64(1.0)}, seed=1)
    (output,) = engine.generate("Hi", params)
    assert output.outputs == engine.generate("Hi", PARAMS.replace(temperature=0.5, seed=1))[0].outputs


def test_drafts_are_counted_and_the_counts_come_back(engine: LLMEngine) -> None:
    """The option crossed to the core as JSON text."""
    by_replica = engine.front.outputs.metrics.spec_decode_by_replica
    before = sum(by_replica[0].accepted) if by_replica else 0
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, allowed_token_ids=[300])
    [output] = engine.generate({"prompt_token_ids": [300] * 8}, params)  # so that drafts are right
    assert output.metrics.num_accepted_drafts == sum(by_replica[0].accepted) - before > 0
    assert output.metrics.num_drafts >= output.metrics.num_accepted_drafts
    assert len(by_replica[0].proposed) == 16  # the default, per request and step


def test_interrupts_at_random_moments(engine: LLMEngine) -> None:
    endure(engine, ["Hi", "Hello", "Well"], SamplingParams(max_tokens=8, seed=4), times=12)


def test_calls_run_between_steps(engine: LLMEngine) -> None:
    engine.check_integrity()
    engine.reset_prefix_cache()
    engine.warmup_model()
    assert engine.generate("Hi", PARAMS)[0].metrics.num_cached_tokens == 0


def test_a_front_that_fails_lets_its_core_go() -> None:
    """The core is loading when the tokenizer's side finds what is wrong."""
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(InvalidParameterError, match="chat_template"):
        LLMEngine("demo", engine_process=True, chat_template="/no/such/file", **OPTIONS)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_core_loads_while_the_tokenizer_is_read(engine: LLMEngine, children_while_reading: list[int]) -> None:
    assert client_of(engine).pids[0] in children_while_reading


def test_a_call_returns_a_value_or_raises_the_error_of_the_core(engine: LLMEngine) -> None:
    client = client_of(engine)
    assert engine._owner.run(lambda: client.call("has_work")) == [False]
    with pytest.raises(EngineError, match=r"TypeError: .*argument"):
        engine._owner.run(lambda: client.call("abort"))
    assert engine.generate("Hi", PARAMS)[0].finished


@pytest.mark.full  # by default tests/server/test_start.py says so, with a server around it
def test_the_front_never_imports_torch() -> None:
    code = (
        "import sys; from octavo import LLMEngine; e = LLMEngine('demo', engine_process=True, num_kv_blocks=64);"
        "e.generate('Hi'); e.exit(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("_fake_core")
def test_a_core_that_cannot_start_raises_its_own_error() -> None:
    with pytest.raises(InsufficientMemoryError, match="max_model_len"):
        LLMEngine("demo", engine_process=True, num_kv_blocks=1)


def test_the_core_leaves_with_its_parent(tmp_path: Path) -> None:
    """And no file is left, in a temporary folder whose name is longer than the address of a Unix socket may be."""
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    code = (
        "import time; from octavo import LLMEngine; from octavo.engine.process_client import ProcessClient;"
        f"ProcessClient.command = {fakes.CORE}; e = LLMEngine('demo', engine_process=True, num_kv_blocks=64);"
        "print(e.front.client.pids[0], flush=True); time.sleep(60)"
    )
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        core_pid = int(parent.stdout.readline())
        assert psutil.pid_exists(core_pid)
        parent.kill()
    assert wait_until_gone(core_pid, within_s=10.0)
    assert list(folder.iterdir()) == []


def test_lines_of_a_child_become_log_records_and_the_pipe_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "octavo.engine.process")
    program = r"import sys; sys.stderr.buffer.write(b'one\ntwo \xff\nlast, without an end')"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        relay_lines(child.stderr).join()
        assert child.stderr.closed
    assert [record.getMessage() for record in caplog.records] == ["one", "two \ufffd", "last, without an end"]


@pytest.mark.parametrize("is_abstract", [True, False])
def test_addresses_take_messages_of_this_user_and_leave_nothing(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))
    addresses = CoreSockets.make(is_abstract=is_abstract)
    with zmq.Context() as context:
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        addresses.bind(inbox, "from-core")
        addresses.connect(outbox, "from-core")
        outbox.send(b"hello")
        assert inbox.recv() == b"hello"
        if is_abstract:
            strange = context.socket(zmq.PULL)
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # so that this user is another
                addresses.bind(strange, "to-core")
            knocking = context.socket(zmq.PUSH)
            addresses.connect(knocking, "to-core")
            knocking.send(b"hello")
            assert not strange.poll(200)
        context.destroy(linger=0)
    addresses.delete()
    addresses.delete()
    assert is_abstract or not Path(addresses.prefix).exists()


@pytest.mark.usefixtures("_fake_core")
async def test_async_llm_snippet_of_the_readme_and_a_core_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Without a model it is the demo, and says so; a stream grows to the whole; everyone who waits is told."""
    caplog.set_level(logging.INFO, logger="octavo")
    async with AsyncLLM(max_restarts=0, **OPTIONS) as llm:
        result = await llm.generate("Hello, world!")
        results = await llm.generate(["Hello", "World"])
        assert any(
            "no model given" in record.getMessage() and "demo" in record.getMessage() for record in caplog.records
        )
        params = PARAMS.replace(logprobs=None, seed=1)
        chunks = [output async for output in llm.chat_stream([{"role": "user", "content": "Hello"}], params)]
        answer = await llm.chat([{"role": "user", "content": "Hello"}], params)
        assert result.finished
        assert [output.prompt for output in results] == ["Hello", "World"]
        assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(chunks))
        assert chunks[-1].text == answer.text
        assert result.prompt == "Hello, world!"
        stream = llm.stream("Hello", SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(stream)
        client = (await llm.engine()).front.client
        assert isinstance(client, ProcessClient)
        os.kill(client.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await llm.generate("Hello")
        engine = weakref.ref(await llm.engine())
    del stream, llm
    gc.collect()
    assert engine() is None  # no error that was raised is kept, with the frames that it went through


def test_a_process_that_cannot_be_started_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ProcessClient, "command", [str(tmp_path / "missing")])
    with pytest.raises(EngineDeadError, match=r"the engine process could not be started: .*missing"):
        LLMEngine("demo", engine_process=True, **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_core_that_is_still_loading_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessClient, "command", [sys.executable, "-c", "import sys; sys.stdin.read()"])
    client = ProcessClient(EngineArgs(model_name="demo").resolve())
    client.close()
    assert client._replicas[0].core.child.returncode == -signal.SIGKILL


def test_a_process_that_ends_before_it_reads_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ProcessClient, "command", [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(msgspec.json, "encode", lambda *_, **__: bytes(1 << 20))  # more than a pipe takes
    with pytest.raises(EngineDeadError, match="exit code 3"):
        LLMEngine("demo", engine_process=True, **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_fake_core")
def test_a_request_to_a_core_that_has_just_been_killed() -> None:
    engine, params = LLMEngine("demo", engine_process=True, **OPTIONS), SamplingParams(max_tokens=12, seed=5)
    expected = engine.generate("Hi", params)[0].outputs
    pid = client_of(engine).pids[0]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, within_s=10.0)  # and nobody may have noticed yet
    assert engine.generate("Hi", params)[0].outputs == expected
    assert client_of(engine).pids[0] != pid
    engine.exit()
