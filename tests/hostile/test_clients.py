"""Clients that are slow, leave, or come in crowds."""

import asyncio
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.breadth import pick
from tests.hostile.conftest import READ_TIMEOUT_S
from tests.hostile.vitals import read_gauges
from tests.hostile.wire import CHAT, LONG, QUESTION, connect, post_bytes, read_answer
from tests.server.http_server import HttpServer

NUM_LEAVERS = pick(100, 300)
NUM_STREAMS = pick(64, 128)


def closed_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side ends the connection; answers before that do not matter."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def encoded(fields: dict[str, Any]) -> bytes:
    return post_bytes(msgspec.json.encode(fields))


async def read_some(server: HttpServer, message: bytes, wanted: int) -> bytes:
    """Send a request, read that many bytes or to the end of the stream, and hang up."""
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    received = b""
    try:
        writer.write(message)
        while len(received) < wanted and b"data: [DONE]" not in received:
            piece = await reader.read(65536)
            assert piece, received[-500:]
            received += piece
    finally:
        writer.transport.abort()
    return received


def text_of(stream: bytes) -> str:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
    chunks = [msgspec.json.decode(line) for line in lines]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", encoded(LONG)[:-5]])
def test_a_request_that_never_ends_is_ended(server: HttpServer, start: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(start)
        if start:
            assert closed_within(connection, READ_TIMEOUT_S * 5)


def test_a_request_letter_by_letter_is_ended_too(server: HttpServer) -> None:
    with connect(server) as connection:
        connection.settimeout(0.05)
        deadline_s = time.monotonic() + READ_TIMEOUT_S * 5
        while time.monotonic() < deadline_s:
            try:
                connection.sendall(b"X")
                if not connection.recv(1000):
                    return
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
    raise AssertionError("still listening")


def test_many_slow_ones_do_not_keep_others_out(server: HttpServer) -> None:
    slow = [connect(server) for _ in range(200)]
    try:
        for connection in slow:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert server.post(CHAT, {"messages": QUESTION, "max_tokens": 1}).status_code == 200
    finally:
        for connection in slow:
            connection.close()


async def test_leaving_in_the_middle_gives_everything_back_and_disturbs_nobody(server: HttpServer) -> None:
    """Thousands of tokens were asked for by each; one who stays must get what it gets alone."""
    staying = encoded({**LONG, "max_tokens": 200})
    alone = text_of(await read_some(server, staying, 10**9))
    leaving = encoded(LONG)
    stayer = asyncio.create_task(read_some(server, staying, 10**9))
    for start in range(0, NUM_LEAVERS, 100):
        await asyncio.gather(*(read_some(server, leaving, 500 + 37 * n) for n in range(start, start + 100)))
    assert text_of(await stayer) == alone
    assert len(alone) > 200


async def test_leaving_before_the_first_token(server: HttpServer) -> None:
    parts = urlsplit(server.url)
    for stream in (True, False):
        message = encoded({**LONG, "stream": stream, "n": 4})
        for _ in range(50):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(message)
            await writer.drain()
            writer.transport.abort()


async def test_a_crowd_is_served_to_the_last(server: HttpServer) -> None:
    message = encoded({**LONG, "max_tokens": 30})
    texts = {
        text_of(stream)
        for stream in await asyncio.gather(*(read_some(server, message, 10**9) for _ in range(NUM_STREAMS)))
    }
    assert len(texts) == 1


def test_a_reader_that_does_not_read(server: HttpServer) -> None:
    """Its answer waits in the server, merged, and holds nobody up."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        parts = urlsplit(server.url)
        connection.connect((parts.hostname, parts.port))
        connection.settimeout(60)
        connection.sendall(encoded({**LONG, "max_tokens": 400}))
        assert server.post(CHAT, {"messages": QUESTION, "max_tokens": 1}).status_code == 200
        received = b""
        while b"data: [DONE]" not in received:
            piece = connection.recv(4096)
            assert piece
            received += piece
    assert len(text_of(received)) > 400


def test_requests_sent_together_are_answered_in_order(server: HttpServer) -> None:
    small = {"messages": QUESTION, "temperature": 0}
    with connect(server) as connection:
        connection.sendall(b"".join(encoded({**small, "max_tokens": n}) for n in (1, 2, 3)))
        counts = [msgspec.json.decode(read_answer(connection)[1])["usage"]["completion_tokens"] for _ in range(3)]
    assert counts == [1, 2, 3]


def test_aborts_are_counted(server: HttpServer) -> None:
    before = read_gauges(server)["octavo_client_aborts_total"]
    with connect(server) as connection:
        connection.sendall(encoded(LONG))
        assert connection.recv(100)
    deadline_s = time.monotonic() + 30
    while read_gauges(server)["octavo_client_aborts_total"] == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_vitals_of_these_tests_see_what_a_server_holds(server: HttpServer) -> None:
    with connect(server) as connection:
        connection.sendall(encoded(LONG))
        assert connection.recv(100)
        deadline_s = time.monotonic() + 30
        while not all(read_gauges(server)[name] > 0 for name in ("octavo_requests_running", "octavo_kv_cache_usage")):
            assert time.monotonic() < deadline_s
        assert read_gauges(server)["octavo_http_requests_in_flight"] == 2
