"""What never becomes a request: heads that are too large, heads and bodies that do not come, what is not HTTP."""

import asyncio
import json

import pytest
from tests.server.tiny import tiny_server

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"


def parts(answer: str) -> tuple[int, str]:
    """Return the status of a raw answer and the code of its error."""
    head, _, body = answer.partition("\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def test_a_head_over_the_limit_is_431() -> None:
    async with tiny_server(max_header_bytes=1000) as tiny:
        one_long_line = b"GET /x HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 1000 + b"\r\n\r\n"
        assert parts(await tiny.send_raw(one_long_line)) == (431, "head_too_large")
        many_lines = b"GET /x HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 200 + b"\r\n"
        assert parts(await tiny.send_raw(many_lines)) == (431, "head_too_large")
        never_ending = [b"GET /x HTTP/1.1\r\nA: "] + [b"a" * 100] * 20
        assert parts(await tiny.send_raw(*never_ending, pause_s=0.01)) == (431, "head_too_large")
        long_path = b"GET /" + b"x" * 1000 + b" HTTP/1.1\r\nHost: h\r\n\r\n"
        assert parts(await tiny.send_raw(long_path)) == (431, "head_too_large")
        assert (await tiny.client.get("/" + "x" * 500)).status_code == 200
        assert tiny.metrics.rejections == {"head_too_large": 4}


async def test_what_is_not_http_is_told_so_as_json(caplog: pytest.LogCaptureFixture) -> None:
    async with tiny_server() as tiny:
        assert parts(await tiny.send_raw(b"\x16\x03\x01 hello\r\n\r\n")) == (400, "invalid_http")
        bad_chunk = HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a length\r\n"
        assert parts(await tiny.send_raw(bad_chunk)) == (400, "invalid_http")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("octavo")]
    assert [text[:26] for text in ours] == ["127.0.0.1 400 invalid_http"] * 2


async def test_a_body_that_does_not_come_is_408() -> None:
    async with tiny_server(read_timeout_s=0.2) as tiny:
        assert parts(await tiny.send_raw(HEAD + b"Content-Length: 9\r\n\r\n{")) == (408, "slow_request")
        drops = [HEAD + b"Content-Length: 99\r\n\r\n"] + [b"{"] * 10
        assert parts(await tiny.send_raw(*drops, pause_s=0.06)) == (408, "slow_request")
        while tiny.metrics.num_in_flight:  # the handler hears of it a moment later
            await asyncio.sleep(0.01)


async def test_a_head_that_does_not_come_is_408_and_silence_is_closed() -> None:
    async with tiny_server(read_timeout_s=0.2) as tiny:
        assert parts(await tiny.send_raw(b"GET /x HTTP/1.1\r\n")) == (408, "slow_request")
        assert await tiny.send_raw() == ""


async def test_time_to_answer_is_not_time_to_read() -> None:
    async with tiny_server(read_timeout_s=0.3) as tiny:
        assert (await tiny.client.post("/v1/wait", json={"seconds": 0.6})).status_code == 200
        await asyncio.sleep(0.6)  # an idle connection is for keep_alive_s to end
        assert (await tiny.client.post("/v1/wait", json={"seconds": 0.0})).status_code == 200


async def test_an_early_answer_reaches_a_client_that_still_sends() -> None:
    async with tiny_server(max_body_bytes=1000) as tiny:
        body = b" " * 5_000_000
        answer = await tiny.client.post("/v1/x", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert (await tiny.client.post("/v1/x", json={})).status_code == 200


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async with tiny_server(keep_alive_s=1) as tiny:
        answer = await tiny.send_raw(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        assert answer.startswith("HTTP/1.1 200")


async def test_pipelined_requests_are_answered_in_turn_and_time_waiting_for_them_is_nobodys_fault() -> None:
    async with tiny_server(read_timeout_s=0.2) as tiny:
        body = b'{"seconds": 0.5}'
        head = b"POST /v1/wait HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        slow = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        half = b"GET /x HTTP/1.1\r\nHost: h\r\n"
        answer = await tiny.send_raw(slow + slow + half, b"Connection: close\r\n\r\n", pause_s=0.05)
        assert answer.count("HTTP/1.1 200") == 3


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with tiny_server() as tiny:
        head = HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
        answer = await tiny.send_raw(head, b"{}", pause_s=0.1)
        assert answer.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_another_protocol_is_declined_and_the_body_is_read(chunked: bool) -> None:
    """Java's HttpClient offers HTTP/2 with every request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    body = b'{"seconds": 0}'
    framed = b"Transfer-Encoding: chunked\r\n\r\ne\r\n" + body + b"\r\n0\r\n\r\n"
    framed = framed if chunked else b"Content-Length: 14\r\n\r\n" + body
    post = b"POST /v1/wait HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    last = b"GET /x HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: close, upgrade\r\n\r\n"
    async with tiny_server() as tiny:
        both = post + offer + framed + last
        for pieces in ([both], [both[:40], both[40:]]):
            assert (await tiny.send_raw(*pieces)).count('{"num_bytes": 14}') == 1
            assert (await tiny.send_raw(*pieces)).count("HTTP/1.1 200 OK") == 2


async def test_http_1_0_gets_neither_chunks_nor_an_interim_answer() -> None:
    async with tiny_server() as tiny:
        head = HEAD.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\n"
        answer = await tiny.send_raw(head + b"Content-Length: 2\r\n\r\n{}")  # its response has no length
        assert answer.startswith("HTTP/1.1 200 OK\r\n")
        fields, _, body = answer.partition("\r\n\r\n")
        assert "connection: close" in fields
        assert "transfer-encoding" not in fields
        assert body == '{"num_bytes": 2}'
        refused = head.replace(b"application/json", b"text/csv") + b"Content-Length: 0\r\n\r\n"
        assert parts(await tiny.send_raw(refused)) == (415, "unsupported_media_type")  # it has one


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with tiny_server(write_timeout_s=0.3) as tiny:
        body = b'{"frame_bytes": 1000000}'
        head = b"POST /v1/stream HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", tiny.port, limit=1)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not tiny.metrics.num_client_aborts:
            await asyncio.sleep(0.01)
        assert tiny.metrics.rejections == {"slow_reader": 1}
        assert tiny.metrics.num_in_flight == 0
        writer.close()
