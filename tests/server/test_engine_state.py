"""The engine's state as the page gets it: from the core by message, while somebody looks."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

from tests.server.http_server import HttpServer

from octavo.config.args import EngineArgs
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.tenants.claim import ClientName, RequestNames
from octavo.server.ui.watch import EngineWatch, Watcher

LONG = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 1000, "ignore_eos": True}


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_request_is_shown_with_its_progress_its_blocks_and_its_name(server: HttpServer) -> None:
    chat = server.client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True})
    with chat as answer:
        assert answer.status_code == 200
        name = answer.headers["x-request-id"]
        with server.client.stream("GET", "/ui/engine") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for event in events(stream.iter_lines()):
                [shown] = [each for each in event["requests"] if each["name"] == name] or [None]
                if shown is not None and shown["status"] == "decode" and "blocks" in event:
                    break
    assert event["status"] == "ready"
    assert shown["num_known"] > shown["num_prompt"] > 0
    assert shown["arrival_s"] <= shown["scheduled_s"] <= shown["first_token_s"]
    assert shown["num_blocks"] > 0
    assert event["stats"]["num_running"] == 1
    [group] = event["blocks"]
    owners = {owner: count for owner, count in group["runs"] if owner >= 0}
    assert sum(owners.values()) * group["stride"] >= shown["num_blocks"]
    assert sum(count for _, count in group["runs"]) == -(-group["num_blocks"] // group["stride"])
    assert event["ttft"]["counts"] == sorted(event["ttft"]["counts"])
    assert len(event["ttft"]["counts"]) == len(event["ttft"]["bounds"]) + 1
    assert any(each["anonymous"] > 0 for each in event["memory"])


async def test_nothing_is_made_when_nobody_looks() -> None:
    args = ServerArgs()
    watch = EngineWatch(EngineLifecycle(EngineArgs(), args), HttpMetrics(), RequestNames())
    came = asyncio.Event()
    watchers = [Watcher(watch), Watcher(watch)]
    for watcher in watchers:
        watcher.start(came.set)
    await asyncio.wait_for(came.wait(), 5.0)
    seen = [json.loads(watcher.take().removeprefix(b"data: ")) for watcher in watchers]
    assert seen[0] == seen[1]  # made once, for all who look
    assert (seen[0]["status"], watchers[0].take()) == ("loading", b"")
    for watcher in watchers:
        watcher.close()
    num_events = watch.num_events
    await asyncio.sleep(0.3)  # longer than between two events
    assert (num_events, watch.num_events) == (1, 1)


def test_who_watches_does_not_keep_a_server_from_ending() -> None:
    with HttpServer(has_model=False) as server:
        with server.client.stream("GET", "/ui/engine") as stream:
            lines = stream.iter_lines()
            assert next(events(lines))["status"] == "ready"
            server.process.send_signal(signal.SIGTERM)
            assert "draining" in "".join(lines)
        assert server.process.wait(10.0) == 0
        assert "exceeded" not in server.log  # the server did not have to break it off


def test_names_are_forgotten_when_there_are_very_many() -> None:
    names = RequestNames()
    for number in range(10_000):
        names.add([str(number)], ClientName(f"req-{number}", None))
    assert names.get("9999") == ("req-9999", None)
    assert names.get("0") is None
