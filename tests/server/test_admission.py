"""A bounded queue, deadlines, and what those outside are told."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message
from tests.server.tiny import HELD, TinyServer, tiny_server

from octavo.server.http.errors import ApiError
from octavo.server.http.exchange import Exchange
from octavo.server.policy import Admission


async def no_message() -> Message:
    raise AssertionError


async def nowhere(message: Message) -> None:
    raise AssertionError


def exchange() -> Exchange:
    """One that is never broken off."""
    return Exchange({"type": "http"}, no_message, nowhere, "id")


def test_the_queue_takes_what_runs_and_what_may_wait_and_no_more() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = exchange()
    with admission.admit(first):
        assert admission.num_samples == 1
        with admission.admit(exchange()):
            with pytest.raises(ApiError) as caught, admission.admit(exchange()):
                pass
            assert caught.value.status == 429
            assert int(caught.value.headers["Retry-After"]) >= 1
        first.num_samples = 2
        with pytest.raises(ApiError), admission.admit(exchange()):
            pass
    assert (len(admission), admission.num_samples) == (0, 0)
    with admission.admit(exchange()):
        assert len(admission) == 1


def test_a_place_is_given_back_whatever_happens() -> None:
    admission = Admission(1, 0)
    with pytest.raises(RuntimeError), admission.admit(exchange()):
        raise RuntimeError
    assert len(admission) == 0


async def wait_for_requests(tiny: TinyServer, num_requests: int) -> None:
    while tiny.metrics.num_in_flight < num_requests:
        await asyncio.sleep(0.001)


def wait(tiny: TinyServer, seconds: float, **fields: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(tiny.client.post("/v1/wait", json={"seconds": seconds, **fields}))


async def test_a_full_queue_is_429_with_retry_after_and_frees_itself() -> None:
    async with tiny_server(max_num_seqs=1, max_waiting=1) as tiny:
        held = [wait(tiny, HELD), wait(tiny, HELD)]
        await wait_for_requests(tiny, 2)
        refused = await tiny.client.post("/v1/wait", json={"seconds": 0})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await tiny.client.get("/v1/models")).status_code == 200  # costs the engine nothing
        for _ in held:
            tiny.released.release()
        assert [(await request).status_code for request in held] == [200, 200]
        assert (await wait(tiny, 0.0)).status_code == 200
        assert tiny.metrics.rejections == {"queue_full": 1}


async def test_samples_count_one_by_one() -> None:
    async with tiny_server(max_num_seqs=1, max_waiting=3) as tiny:
        held = wait(tiny, HELD, n=4)
        await wait_for_requests(tiny, 1)
        await asyncio.sleep(0.05)  # until the route has read n
        assert (await wait(tiny, 0.0)).status_code == 429
        tiny.released.release()
        assert (await held).status_code == 200


@pytest.mark.parametrize(
    ("limit_s", "header", "field"),
    [(0.1, None, None), (None, "0.1", None), (None, None, 0.1), (9.0, "0.1", 5.0), (0.1, "9", None), (9.0, "8", 0.1)],
)
async def test_the_earliest_of_three_deadlines_ends_a_request(
    limit_s: float | None, header: str | None, field: float | None
) -> None:
    async with tiny_server(request_timeout_s=limit_s) as tiny:
        headers = {} if header is None else {"X-Request-Timeout": header}
        answer = await tiny.client.post("/v1/wait", json={"seconds": 8.0, "timeout": field}, headers=headers)
        assert answer.status_code == 408
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
        assert tiny.metrics.rejections == {"request_timeout": 1}
        assert (await wait(tiny, 0.0)).status_code == 200


async def test_a_stream_that_reaches_its_deadline_ends_with_an_error_event() -> None:
    async with tiny_server() as tiny:
        answer = await tiny.client.post("/v1/stream", json={}, headers={"X-Request-Timeout": "0.1"})
        assert answer.status_code == 200
        *events, error, done, rest = answer.text.split("\n\n")
        assert set(events) == {"data: {}"}
        assert '"code":"request_timeout"' in error
        assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
async def test_a_deadline_that_is_no_time_is_400(value: str) -> None:
    async with tiny_server() as tiny:
        answer = await tiny.client.post("/v1/wait", json={"seconds": 0}, headers={"X-Request-Timeout": value})
        assert answer.status_code == 400
        assert "timeout" in answer.json()["error"]["param"].lower()


async def test_a_timeout_of_something_else_is_not_taken_for_the_deadline() -> None:
    async with tiny_server(request_timeout_s=60.0) as tiny:
        assert (await tiny.client.post("/v1/fail", json={})).status_code == 500
