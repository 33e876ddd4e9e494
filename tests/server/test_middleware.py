"""Request ids, the access log, bodies, CORS and faults, through a real server."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from tests.server.tiny import TinyServer, tiny_server

from octavo.server.listen import JsonFormatter


@pytest.fixture
async def tiny() -> AsyncIterator[TinyServer]:
    async with tiny_server(max_body_bytes=1000) as server:
        yield server


def error_of(response: Any) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_request_id_is_echoed_or_made(tiny: TinyServer) -> None:
    echoed = await tiny.client.get("/x", headers={"X-Request-Id": "trace-1.2:3/4"})
    assert echoed.headers["x-request-id"] == "trace-1.2:3/4"
    made = [(await tiny.client.get("/x")).headers["x-request-id"] for _ in range(2)]
    assert made[0].startswith("req-")
    assert made[0] != made[1]
    for unsound in (b"a b", b'a"b', b"x" * 129, b"\xc3\xa9"):
        answer = await tiny.client.get("/x", headers={b"X-Request-Id": unsound})
        assert answer.headers["x-request-id"].startswith("req-")


async def test_errors_carry_the_request_id_too(tiny: TinyServer) -> None:
    answer = await tiny.client.post("/v1/x", content=b"{}", headers={"Content-Type": "text/csv", "X-Request-Id": "a"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (415, "a")


async def test_the_access_log_has_the_facts(tiny: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    await tiny.client.post("/v1/x", json={"a": "é\n"}, headers={"X-Request-Id": "me"})
    await tiny.client.get("/health")
    (record,) = [record for record in caplog.records if record.name == "octavo.access"]
    facts = record.__dict__["facts"]
    assert facts.items() >= {
        "method": "POST", "path": "/v1/x", "status": 200, "prompt_tokens": 3, "completion_tokens": 4,
        "request_id": "me", "client": "127.0.0.1", "bytes": 17,
    }.items()  # fmt: skip
    assert facts["ms"] > 0
    assert "POST /v1/x 200" in record.getMessage()
    assert '"prompt_tokens":3' in JsonFormatter().format(record)


async def test_no_line_can_be_forged_by_a_path(tiny: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    await tiny.client.get("/x%0AGET%20/forged")
    assert "\n" not in caplog.records[-1].getMessage()
    assert "\n" not in JsonFormatter().format(caplog.records[-1])


async def test_the_access_log_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "octavo.access")
    async with tiny_server(access_log=False) as tiny:
        await tiny.client.get("/x")
    assert not caplog.records


async def test_a_body_up_to_the_limit_passes_and_one_byte_more_is_413(tiny: TinyServer) -> None:
    fits = b'{"a":"' + b"x" * 992 + b'"}'
    json_type = {"Content-Type": "application/json"}
    assert (await tiny.client.post("/v1/x", content=fits, headers=json_type)).json() == {"num_bytes": 1000}
    refused = await tiny.client.post("/v1/x", content=fits + b" ", headers=json_type)
    assert refused.status_code == 413
    assert error_of(refused)["code"] == "request_too_large"


async def test_a_body_of_unknown_length_is_counted(tiny: TinyServer) -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b" " * 100

    refused = await tiny.client.post("/v1/x", content=chunks(), headers={"Content-Type": "application/json"})
    assert refused.status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"Content-Type": ""}, 200),
        ({"Content-Type": "text/plain"}, 415),  # a page elsewhere may send it without asking
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
async def test_content_types(tiny: TinyServer, headers: dict[str, str], status: int) -> None:
    answer = await tiny.client.post("/v1/x", content=b"{}", headers=headers)
    assert answer.status_code == status
    assert status == 200 or error_of(answer)["type"] == "invalid_request_error"


async def test_a_byte_order_mark_before_the_body_is_dropped(tiny: TinyServer) -> None:
    answer = await tiny.client.post("/v1/x", content=b"\xef\xbb\xbf{}", headers={"Content-Type": "application/json"})
    assert answer.json() == {"num_bytes": 2}


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(tiny: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    answer = await tiny.client.post("/v1/fail", json={})
    assert answer.status_code == 500
    assert "passwd" not in answer.text
    assert error_of(answer)["code"] == "internal_error"
    assert any(record.exc_info for record in caplog.records)
    assert tiny.metrics.responses == {500: 1}


async def test_a_client_that_leaves_is_counted(tiny: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    async with tiny.client.stream("POST", "/v1/stream", json={}) as response:
        assert response.status_code == 200
        assert (tiny.metrics.num_in_flight, tiny.metrics.num_client_aborts) == (1, 0)
    while tiny.metrics.num_in_flight:
        await asyncio.sleep(0.01)
    assert tiny.metrics.num_client_aborts == 1
    assert "client_left=True" in caplog.records[-1].getMessage()


async def test_cors_is_off_until_asked_for(tiny: TinyServer) -> None:
    answer = await tiny.client.get("/x", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers
    async with tiny_server(cors_allow_origins=("https://a.example",), api_key=("k",)) as open_to_a:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        preflight = await open_to_a.client.options("/v1/x", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = await open_to_a.client.get("/x", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = await open_to_a.client.get("/x", headers={"Origin": "https://b.example", "x-api-key": "k"})
        assert "access-control-allow-origin" not in other.headers
