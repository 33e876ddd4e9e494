"""Kill a whole server at random while it streams, start it again, and let its clients come back for the rest.

    python -m tests.chaos.front_storm --requests 100 --every 4 8 --most 3 --out storm.json

Clients lose their connections on their own, too. Every answer is compared with that of a server that nobody disturbs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import psutil
from tests.chaos.storm import CHAT, KINDS, Answer, make_bodies, save_demo_adapter, stream_all
from tests.server.http_server import HttpServer

RETRY_S = 0.1
RESUME_S = "120"


@dataclass(kw_only=True, slots=True)
class Report:
    """What came of it. Times in seconds."""

    num_requests: int
    num_equal: int
    num_kills: int
    num_cuts: int  # by clients
    num_returns: int  # with the id of an event
    num_repeats: int  # with the key alone
    differing: dict[str, int]  # by kind
    example: list[str]  # the first of them: as it should be, as it was
    restart_s: list[float]  # from each kill until the next server had loaded its model
    undisturbed_s: float
    disturbed_s: float


async def events_of(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield id and data of each complete event."""
    event_id = data = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not line and data:
            yield event_id, data
            data = ""


class Client:
    """One request, until its answer is complete, whatever happens to its connections."""

    def __init__(self, url: str, body: dict[str, Any], number: int, counts: Counter[str], cut: float) -> None:
        self.answer = Answer()
        self._url, self._body, self._counts = url, body, counts
        self._headers = {"Idempotency-Key": f"request {number}"}
        self._cut, self._rng = cut, random.Random(number)  # cut: the chance at each event

    async def run(self) -> Answer:
        while not self.answer.is_done and self.answer.error is None:
            with contextlib.suppress(httpx.TransportError):
                await self._attempt()
            await asyncio.sleep(RETRY_S)
        return self.answer

    async def _attempt(self) -> None:
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None) as client,
            client.stream("POST", CHAT, json=self._body, headers=self._headers) as response,
        ):
            if response.status_code == 503:  # it is loading
                return
            if response.status_code != 200:
                self.answer.error = (await response.aread()).decode()
                return
            self._counts["returns" if "Last-Event-ID" in self._headers else "posts"] += 1
            async for event_id, data in events_of(response):
                self._headers["Last-Event-ID"] = event_id
                if data == "[DONE]":
                    self.answer.is_done = True
                    return
                self.answer.add(json.loads(data))
                if self._rng.random() < self._cut:
                    self._counts["cuts"] += 1
                    return


def kill_all(server: HttpServer) -> None:
    """Kill a server and all processes below it at once."""
    process = psutil.Process(server.process.pid)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    server.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_and_kill(flags: list[str], every: tuple[float, float], most: int, is_done: asyncio.Event) -> list[float]:
    """Serve, and kill what serves, until all clients have their answers; return how long each restart took."""
    rng, restart_s = random.Random(1), list[float]()
    for kills_left in reversed(range(most + 1)):
        start_s = time.monotonic()
        with HttpServer(*flags) as server:
            restart_s.append(time.monotonic() - start_s)
            end_s = time.monotonic() + (rng.uniform(*every) if kills_left else float("inf"))
            while time.monotonic() < end_s and not is_done.is_set():
                time.sleep(0.05)
            if is_done.is_set():
                break
            kill_all(server)
    return restart_s[1:]


def run(*, requests: int, every: tuple[float, float], most: int, concurrency: int = 32, cut: float = 0.005) -> Report:
    """Run all requests on a server that nobody disturbs, then on servers of which `most` are killed one by one."""
    kinds, bodies = zip(*make_bodies(requests, sees=False), strict=True)
    counts: Counter[str] = Counter()

    async def disturbed(url: str, flags: list[str]) -> tuple[list[Answer], list[float]]:
        turn, is_done = asyncio.Semaphore(concurrency), asyncio.Event()

        async def one(number: int) -> Answer:
            async with turn:
                return await Client(url, bodies[number], number, counts, cut).run()

        serving = asyncio.create_task(asyncio.to_thread(serve_and_kill, flags, every, most, is_done))
        try:
            answers = await asyncio.gather(*[one(number) for number in range(requests)])
        finally:
            is_done.set()
            restart_s = await serving
        return answers, restart_s

    with TemporaryDirectory() as folder:
        save_demo_adapter(Path(folder) / "odd")
        flags = ["--enable-lora", "--lora-modules", f"odd={folder}/odd"]
        with HttpServer(*flags) as server:
            start_s = time.monotonic()
            expected = asyncio.run(stream_all(server.url, list(bodies), concurrency))
            undisturbed_s = time.monotonic() - start_s
        port = free_port()
        flags += ["--port", str(port), "--state-dir", f"{folder}/state", "--resume-s", RESUME_S]
        start_s = time.monotonic()
        answers, restart_s = asyncio.run(disturbed(f"http://127.0.0.1:{port}", flags))
        disturbed_s = time.monotonic() - start_s
    pairs = [(kind, *each) for kind, *each in zip(kinds, expected, answers, strict=True)]
    differing = [(kind, one.outcome, other.outcome) for kind, one, other in pairs if one.outcome != other.outcome]
    return Report(
        num_requests=requests,
        num_equal=requests - len(differing),
        num_kills=len(restart_s),
        num_cuts=counts["cuts"],
        num_returns=counts["returns"],
        num_repeats=counts["posts"] - requests,
        differing=dict(Counter(kind for kind, *_ in differing)),
        example=[repr(outcome) for _, *outcomes in differing[:1] for outcome in outcomes],
        restart_s=[round(each, 1) for each in restart_s],
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10 * len(KINDS))
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--every", type=float, nargs=2, default=(4.0, 8.0), help="seconds from a start to a kill")
    parser.add_argument("--most", type=int, default=3, help="kills")
    parser.add_argument("--out", type=Path, help="write the report there, as JSON")
    given = parser.parse_args()
    report = run(requests=given.requests, every=tuple(given.every), most=given.most, concurrency=given.concurrency)
    text = json.dumps(asdict(report), indent=2)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n")
    return int(report.num_equal < report.num_requests)


if __name__ == "__main__":
    sys.exit(main())
