"""kill -9 of the whole server in the middle of streams: the next one has what its clients come back for."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server.http_server import HttpServer, numbers
from tests.server.returning_client import (
    ANN,
    BOB,
    RawStream,
    back,
    event_id,
    key,
    texts,
    wait_for_idle,
    wait_until_it_runs,
    without_name,
)

BODY: dict[str, Any] = {"prompt": "Octavo is", "max_tokens": 150, "ignore_eos": True, "temperature": 1}
STREAM = {**BODY, "stream": True}


def server(state_dir: Path, *flags: str) -> HttpServer:
    keys = ("--api-key", "ann", "--api-key", "bob")
    return HttpServer("--state-dir", str(state_dir), *keys, *flags, has_model=False, headers=ANN)


def kill(running: HttpServer) -> None:
    """Kill all processes of a server at once."""
    process = psutil.Process(running.process.pid)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    running.process.wait()


def contents(events: list[bytes]) -> list[bytes]:
    return sorted(event.partition(b"\n")[2] for event in without_name(events))


def test_the_next_server_goes_on_with_the_streams_of_one_that_was_killed(tmp_path: Path) -> None:
    seeded = {**STREAM, "seed": 3, "stream_options": {"include_usage": True}}
    bodies = [seeded, {**seeded, "n": 3}, STREAM, {**STREAM, "prompt": ["Octavo is", "A block is"]}]
    journal = tmp_path / "answers.sqlite3"
    journal.write_bytes(b"no database " * 1000)  # damaged: that costs no request
    with server(tmp_path, "--resume-s", "60") as first:
        health = first.client.get("/health").json()
        assert (health["status"], "set aside" in health["journal"]) == ("ok", True)
        assert first.log.count("set aside") == 1
        assert journal.stat().st_mode & 0o077 == 0
        done = RawStream(first, {**BODY, "max_tokens": 5}, headers=key("done")).json()
        over = RawStream(first, {**STREAM, "max_tokens": 5}).events()
        streams = [RawStream(first, body) for body in bodies]
        got = [stream.events(10 + 7 * number) for number, stream in enumerate(streams)]
        RawStream(first, BODY, headers=key("running"), before_answer=lambda: wait_until_it_runs(first, 8))
        kill(first)
        for stream in streams:
            stream.cut()
    with server(tmp_path, "--resume-s", "60") as second:
        assert second.client.get("/health").json() == {"status": "ok"}
        running = RawStream(second, BODY, headers=key("running"))  # it waits for the one that is computed again
        whole = [events + RawStream(second, body, headers=back(events[-1])).events()
                 for events, body in zip(got, bodies, strict=True)]  # fmt: skip
        wait_for_idle(second)
        num_tokens = numbers(second)["octavo_generation_tokens_total"]
        assert num_tokens == BODY["max_tokens"] * 8
        for body, events in zip(bodies[:2], whole, strict=False):  # as if nothing had happened
            undisturbed = RawStream(second, body).events()
            assert texts(events) == texts(undisturbed)
            if "n" not in body:
                assert without_name(events) == without_name(undisturbed)
            assert contents(events) == contents(undisturbed)  # whatever the turns that choices take
        for events in whole[2:]:  # each has the seed that was drawn for it
            path = f"/v1/streams/{event_id(events[0]).partition(':')[0]}"
            assert texts(events) == texts(RawStream(second, None, method="GET", path=path).events())
        assert {len(text) for text in texts(whole[3]).values()} != {0}
        num_tokens = numbers(second)["octavo_generation_tokens_total"]
        assert running.json() == RawStream(second, BODY, headers=key("running")).json()
        assert RawStream(second, {**BODY, "max_tokens": 5}, headers=key("done")).json() == done  # not computed again
        assert RawStream(second, {**STREAM, "max_tokens": 5}, headers=back(over[1])).events() == over[2:]
        assert RawStream(second, STREAM, headers=BOB | back(got[2][0])).error_code == "stream_not_found"
        assert numbers(second)["octavo_generation_tokens_total"] == num_tokens
        assert "Traceback" not in second.log


@pytest.mark.full
def test_what_a_shutdown_cuts_is_computed_by_the_next_server(tmp_path: Path) -> None:
    body = {**STREAM, "max_tokens": 600}
    with server(tmp_path, "--resume-s", "60", "--drain-timeout-s", "0.1") as first:
        stream = RawStream(first, body)
        got = stream.events(3)
        first.process.send_signal(signal.SIGTERM)
        got += stream.events()
        assert b"draining" in got[-2]
        assert first.process.wait() == 1
    with server(tmp_path, "--resume-s", "60") as second:
        whole = got[:-2] + RawStream(second, body, headers=back(got[-3])).events()
        path = f"/v1/streams/{event_id(got[0]).partition(':')[0]}"
        assert whole == RawStream(second, None, method="GET", path=path).events()
