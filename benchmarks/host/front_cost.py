"""CPU that the front process spends on a token of a stream: from the core's message to bytes in the socket.

    python -m benchmarks.host.front_cost [--streams 512] [--step-ms 5] [--json FILE]

The server is the real one, over real HTTP; only its core has no model: tokens are drawn at random, and a step takes
`--step-ms` at least. What is measured is the CPU time of the front process, user and system, so that a busy machine
does not count. Two runs that differ in nothing but the length of the answers give the cost of a token without that of
a request. Aim: 10 us.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput

STEP_S_VARIABLE = "FRONT_COST_STEP_S"
PROMPT = "What is Octavo?"


class PacedExecutor:
    """A model without a model: any token, after a while."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_blocks = config.cache.num_kv_blocks or 1
        self._vocab_size = config.model.vocab_size
        self._random = np.random.default_rng(0)
        self._step_s = float(os.environ[STEP_S_VARIABLE])

    max_steps_in_flight = 1

    @property
    def profile(self) -> str:
        return "none"

    def start(self) -> list[int]:
        return [self._num_blocks]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(self._step_s)
        token_ids = self._random.integers(100, self._vocab_size, (len(scheduler_output.req_ids), 1), dtype=np.int32)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(
            ModelRunnerOutput(
                req_ids=scheduler_output.req_ids,
                sampled_token_ids=token_ids,
                num_sampled=scheduler_output.samples.astype(np.int32),
            )
        )
        return future

    def call(self, method: str, *arguments: Any) -> Future[list[bool]]:
        """Nothing is lazy here, and no memory to prefault."""
        done: Future[list[bool]] = Future()
        done.set_result([False])
        return done

    def check_health(self) -> None:
        """No rank can be gone."""

    def exit(self) -> None:
        """Nothing is held."""


def run_core() -> int:
    """Be the core process, with a `PacedExecutor`."""
    from octavo.engine import core_proc

    vars(core_proc)["make_executor"] = PacedExecutor
    return core_proc.main()


def run_front(flags: list[str]) -> None:
    """Be the server, with `run_core` for a core."""
    from octavo.cli.main import app
    from octavo.engine.process_client import ProcessClient

    ProcessClient.command = (sys.executable, __file__, "--role", "core")
    app(["serve", "demo", *flags])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run."""

    num_streams: int
    num_tokens: int  # of each stream
    user_s: float
    system_s: float
    wall_s: float
    num_chunks: int
    longest_gap_s: float  # between two reads of any one stream


async def run_streams(port: int, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """Read all streams to their ends; return the number of chunks and the longest gap."""
    body = json.dumps({
        "messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": num_tokens,
        "ignore_eos": True,
    }).encode()  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
           f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"  # fmt: skip
    gathered = await asyncio.gather(*(read_stream(port, head.encode() + body) for _ in range(num_streams)))
    return sum(chunks for chunks, _ in gathered), max(gap for _, gap in gathered)


async def read_stream(port: int, request: bytes) -> tuple[int, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(request)
    num_chunks, longest_s, tail, last_s = 0, 0.0, b"", None
    while data := await reader.read(2**16):
        now_s = time.perf_counter()
        longest_s = max(longest_s, now_s - (last_s or now_s))
        last_s = now_s
        num_chunks += data.count(b"data: ")
        tail = (tail + data)[-100:]
    writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError(f"a stream was broken off: {tail!r}")
    return num_chunks, longest_s


def measure(front: psutil.Process, port: int, num_streams: int, num_tokens: int) -> Sample:
    before, start_s = front.cpu_times(), time.perf_counter()
    num_chunks, longest_gap_s = asyncio.run(run_streams(port, num_streams, num_tokens))
    after, wall_s = front.cpu_times(), time.perf_counter() - start_s
    return Sample(
        num_streams=num_streams, num_tokens=num_tokens, user_s=after.user - before.user,
        system_s=after.system - before.system, wall_s=wall_s, num_chunks=num_chunks, longest_gap_s=longest_gap_s,
    )  # fmt: skip


def report(short: Sample, long: Sample) -> dict[str, float]:
    """Return microseconds per token from the difference of two runs."""
    num_tokens = long.num_streams * (long.num_tokens - short.num_tokens)
    user_us = (long.user_s - short.user_s) / num_tokens * 1e6
    system_us = (long.system_s - short.system_s) / num_tokens * 1e6
    return {
        "user_us_per_token": user_us,
        "system_us_per_token": system_us,
        "total_us_per_token": user_us + system_us,
        "chunks_per_token": (long.num_chunks - short.num_chunks) / num_tokens,
        "tokens_per_s": num_tokens / (long.wall_s - short.wall_s),
        "longest_gap_s": long.longest_gap_s,
    }


def wait_for_port(front: "subprocess.Popen[str]") -> int:
    assert front.stderr is not None
    for line in front.stderr:
        if "listening on" in line:
            return int(line.rsplit(":", 1)[1])
    raise RuntimeError("the server did not start")


def wait_until_ready(port: int) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/health").close()
        except HTTPError:
            time.sleep(0.05)
        else:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs=2, default=[100, 500], help="lengths of answers in the two runs")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step of the core takes at least")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    flags = ["--port", "0", "--no-access-log", "--max-num-seqs", str(options.streams), "--num-kv-blocks",
             str(options.streams * 20), "--log-level", "warning"]  # fmt: skip
    environment = {**os.environ, STEP_S_VARIABLE: str(options.step_ms / 1e3)}
    command = [sys.executable, "-m", "benchmarks.host.front_cost", "--role", "front", *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as front:
        try:
            port = wait_for_port(front)
            wait_until_ready(port)
            measure(psutil.Process(front.pid), port, options.streams, 5)  # warm
            samples = [measure(psutil.Process(front.pid), port, options.streams, length) for length in options.tokens]
        finally:
            front.terminate()
    figures = report(*samples)
    for name, value in figures.items():
        print(f"{name:>22} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps([figures, *map(asdict, samples)], indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:3] == ["--role", "core"]:
        del sys.argv[1:3]
        sys.exit(run_core())
    if sys.argv[1:3] == ["--role", "front"]:
        run_front(sys.argv[3:])
    else:
        main()
