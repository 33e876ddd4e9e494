"""What the server counts: requests and tokens add up, and a request whose time is over leaves the engine."""

import time
from typing import Any

from tests.server.http_server import HttpServer, numbers, parse_events

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a block?"}]}
LONG: dict[str, Any] = {**QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True}
CHAT = "/v1/chat/completions"
END_S = 20.0


def numbers_at_rest(server: HttpServer) -> dict[str, float]:
    """Wait until no request is left, of other tests neither."""
    deadline_s = time.monotonic() + END_S
    while (found := numbers(server))["octavo_requests_running"] or found["octavo_requests_waiting"]:
        assert time.monotonic() < deadline_s, "the engine goes on with requests that are over"
        time.sleep(0.05)
    return found


def test_numbers_add_up_and_a_deadline_frees_the_engine(server: HttpServer) -> None:
    before = numbers_at_rest(server)
    usage = server.post(CHAT, {**QUESTION, "max_tokens": 12, "ignore_eos": True, "n": 2}).json()["usage"]
    late = server.client.post(CHAT, json={**LONG, "stream": False}, headers={"X-Request-Timeout": "0.2"})
    assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
    broken_off = server.client.post(CHAT, json={**LONG, "timeout": 0.3})
    assert parse_events(broken_off.text)[-1]["error"]["code"] == "request_timeout"
    bad = server.post(CHAT, {**QUESTION, "timeout": -1})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "timeout")
    after = numbers_at_rest(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert usage["completion_tokens"] == 24
    assert grown["octavo_generation_tokens_total"] > 24
    assert grown["octavo_request_generation_tokens_count"] == 4
    assert grown["octavo_time_to_first_token_seconds_count"] == 3
    assert grown["octavo_requests_rejected_total"] == 3  # late twice, and a bad value
    assert grown["octavo_requests_finished_total"] == 4
    assert after["process_open_fds"] > 0
