"""A server over several replicas, one of which is killed."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.server.http_server import HttpServer

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a block?"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


def read_to_end(server: HttpServer) -> str:
    """Return the last event but [DONE]: a chunk of the answer, or an error."""
    events: list[str] = []
    with server.client.stream("POST", CHAT, json=LONG) as response:
        events.extend(line.removeprefix("data: ") for line in response.iter_lines() if line)
    return events[-2] if events[-1] == "[DONE]" else events[-1]


def replica_up(server: HttpServer) -> dict[str, float]:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "octavo_replica_up"
    }


def running(server: HttpServer) -> float:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return sum(
        sample.value for family in families for sample in family.samples if sample.name == "octavo_requests_running"
    )


def test_streams_outlive_a_replica_and_the_server_its_last_one_does_not() -> None:
    flags = ("--data-parallel-size", "2", "--num-kv-blocks", "256", "--max-restarts", "1")
    with HttpServer(*flags, has_model=False) as server, ThreadPoolExecutor() as threads:
        assert server.client.get("/health").json() == {"status": "ok"}
        streams = [threads.submit(read_to_end, server) for _ in range(2)]
        while running(server) < 2:
            time.sleep(0.02)
        replicas = psutil.Process(server.process.pid).children()
        assert len(replicas) == 2
        replicas[1].send_signal(signal.SIGKILL)
        seen = []
        while not all(stream.done() for stream in streams) or replica_up(server)["1"] == 0.0:
            health = server.client.get("/health")
            seen.append((health.status_code, health.json()["status"]))
            time.sleep(0.02)
        assert (200, "degraded") in seen
        assert seen[-1][0] == 200
        ends = [json.loads(stream.result())["choices"][0]["finish_reason"] for stream in streams]
        assert ends == ["length", "length"]
        assert replica_up(server) == {"0": 1.0, "1": 1.0}
        answer = server.post(CHAT, {**LONG, "stream": False, "max_tokens": 5})
        assert answer.status_code == 200
