"""Engines and servers on several real ranks: what becomes of them when something is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2 as httpx
import pytest
from tests.executor.conftest import possessions
from tests.executor.processes import are_gone, descendants, ranks_below, wait_until
from tests.fakes import CORE
from tests.server.http_server import HttpServer

from octavo import LLM, SamplingParams
from octavo.engine.process_client import ProcessClient
from octavo.errors import EngineDeadError

TWO_RANKS = {"tensor_parallel_size": 2, "dtype": "float32", "num_kv_blocks": 128, "max_num_seqs": 8}
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@contextmanager
def nothing_left() -> Iterator[None]:
    before = possessions()
    yield
    left = possessions() - before
    assert not [what for what in left if what[0] != "descriptor"]


@pytest.mark.full
def test_an_engine_in_this_process_names_the_dead_rank() -> None:
    with nothing_left():
        llm = LLM("demo", **TWO_RANKS)
        assert llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)[0].finished
        pids = ranks_below(os.getpid())
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 .*SIGKILL"):
            llm.generate("Hello", LONG, use_tqdm=False)
        wait_until(lambda: are_gone(pids))
        llm.exit()


def test_ranks_of_a_core_that_is_killed_are_gone_and_those_of_the_next_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessClient, "command", CORE)
    with nothing_left():
        llm = LLM("demo", engine_process=True, **TWO_RANKS)
        client = llm.engine.front.client
        assert isinstance(client, ProcessClient)
        pids = ranks_below(client.pids[0])
        assert len(pids) == 2
        os.kill(client.pids[0], signal.SIGKILL)
        [output] = llm.generate("Hello", LONG, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        wait_until(lambda: are_gone(pids))
        llm.exit()


@pytest.mark.full  # by default a program with one rank does (tests/engine/test_process_client.py), and see above
def test_a_program_that_is_killed_takes_all_along() -> None:
    code = f"from octavo import LLM; llm = LLM('demo', engine_process=True, **{TWO_RANKS!r}); print(flush=True)"
    command = [sys.executable, "-c", f"{code}; input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"\n"
        below = descendants(program.pid)
        assert len(below) == 3
        program.kill()
        wait_until(lambda: are_gone(below))


@pytest.mark.full  # by default tests/server/test_data_parallel.py sees a server end with its engines
@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_ends_with_its_rank(rank: int) -> None:
    """Where no engine is started again."""
    flags = ("--tensor-parallel-size", "2", "--num-kv-blocks", "128", "--max-num-seqs", "8", "--max-restarts", "0")
    with nothing_left(), HttpServer(*flags, starts_python=True) as server:
        server.wait_until_ready()
        pids = ranks_below(server.process.pid)
        assert len(pids) == 2
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        if rank == 0:  # in the middle of a stream; the other is killed while idle
            with server.client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(pids[rank], signal.SIGKILL)
                assert any("rank 0" in line for line in lines), "the stream's end does not name the rank"
        else:
            os.kill(pids[rank], signal.SIGKILL)
        wait_until(lambda: f"rank {rank}" in server.log)
        wait_until(lambda: are_gone(pids))
        assert server.process.wait(20.0) == 1
        with pytest.raises(httpx.ConnectError):
            server.client.get("/health")
