"""deploy/ray_serve.py with a real Ray Serve: two replicas, prompts that begin alike meet one of them, one is killed."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import httpx2 as httpx
import psutil
import pytest
import ray
from ray import serve

ROOT = Path(__file__).parents[2]
LEADS = [
    f"{text} " * 6
    for text in ("The quick brown fox jumps over it.", "A block holds keys and values.", "1 2 3 4 5 6 7 8.")
]


class Answer(NamedTuple):
    """Which replica answered, in how many events, and whether to the end."""

    replica: str | None
    num_events: int
    is_whole: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False, runtime_env=environ)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(import_module("deploy.ray_serve").app, name="octavo")
    yield f"http://127.0.0.1:{port}/completions"
    serve.shutdown()
    ray.shutdown()


def ask(url: str, prompt: str, max_tokens: int = 4) -> Answer:
    replica, count = None, 0
    try:
        with httpx.stream("POST", url, json={"prompt": prompt, "max_tokens": max_tokens}, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    replica, count = json.loads(line.removeprefix("data: "))["replica"], count + 1
    except httpx.RemoteProtocolError:
        return Answer(replica, count, is_whole=False)
    return Answer(replica, count, is_whole=response.status_code == 200)


def replicas() -> list[psutil.Process]:
    """Return the processes of this Ray that run an engine's replica."""
    return [
        p for p in psutil.Process().children(recursive=True) if "ServeReplica:octavo:Engine" in "".join(p.cmdline())
    ]


@pytest.mark.full  # minutes: two engines, a proxy and a controller start
@pytest.mark.timeout(400)
def test_prefixes_stay_and_a_killed_replica_takes_nobody_along(url: str) -> None:
    homes = [{ask(url, f"{lead}{number}").replica for number in range(5)} for lead in LEADS]
    assert [len(home) for home in homes] == [1, 1, 1]
    assert len(set().union(*homes)) == 2
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, url, f"{number} begins in its own way, {number}", 300) for number in range(8)]
        time.sleep(2.0)
        os.kill(replicas()[0].pid, signal.SIGKILL)
        later = [ask(url, f"Later {number}") for number in range(4)]
        answers = [each.result() for each in running]
    assert all(answer.is_whole for answer in later)
    survivor = later[-1].replica
    assert all(answer.is_whole for answer in answers if answer.replica == survivor)
    assert {answer.replica for answer in answers if not answer.is_whole} <= set().union(*homes) - {survivor}
    deadline_s = time.monotonic() + 120
    while len({ask(url, os.urandom(16).hex()).replica for _ in range(6)}) < 2:  # the one in its place
        assert time.monotonic() < deadline_s
        time.sleep(1.0)
