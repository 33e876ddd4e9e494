"""The HTTP client: connections kept and dropped, bodies in pieces, and every way in which a server may fail it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
from tests.cli.scripted_server import Answer, Body, HangUpError, ScriptedServer, event, tokens

from octavo.cli.client import HttpClient
from octavo.errors import InvalidParameterError, RequestError

BODY = json.dumps({"max_tokens": 3}).encode()


async def test_requests_one_after_another_share_a_connection(server: ScriptedServer) -> None:
    pieces: list[bytes] = []
    async with HttpClient(server.url) as client:
        for _ in range(3):
            response = await client.post("/v1/completions", BODY, pieces.append)
            assert (response.status, bytes(response.body)) == (200, b"")
            assert response.headers["content-type"] == "text/event-stream"
    assert b"".join(pieces) == b"".join(tokens(3)) * 3
    assert len(server.connections) == 1


async def test_requests_at_once_have_connections_of_their_own(server: ScriptedServer) -> None:
    meeting = threading.Barrier(4)

    def script(_: Body) -> Answer:
        meeting.wait(timeout=30)
        return Answer(200, {})

    server.script = script
    async with HttpClient(server.url) as client:
        responses = await asyncio.gather(*(client.post("/v1/completions", BODY) for _ in range(4)))
    assert [bytes(response.body) for response in responses] == [b"{}"] * 4
    assert len(server.connections) == 4


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.client.MAX_IDLE_S", 0.0)
    async with HttpClient(server.url) as client:
        await client.get("/v1/models")
        await client.get("/v1/models")
    assert len(server.connections) == 2


async def test_an_error_goes_to_the_response_and_not_to_the_reader(server: ScriptedServer) -> None:
    server.script = lambda _: Answer(418, {"error": {"message": "short and stout"}})
    pieces: list[bytes] = []
    async with HttpClient(server.url) as client:
        response = await client.post("/v1/completions", BODY, pieces.append)
    assert (response.status, pieces) == (418, [])
    assert b"stout" in response.body


async def test_cancelling_leaves(server: ScriptedServer) -> None:
    came = asyncio.Event()
    server.script = lambda _: tokens(100_000_000)
    request = asyncio.create_task(HttpClient(server.url).post("/v1/completions", BODY, lambda _: came.set()))
    await came.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert await asyncio.to_thread(server.client_left.wait, 30)


async def test_a_stream_that_breaks_off_is_an_error(server: ScriptedServer) -> None:
    def break_off(_: Body) -> Iterator[bytes]:
        yield event({"choices": []})
        raise HangUpError

    server.script = break_off
    with pytest.raises(RequestError, match="before the response ended"):
        await HttpClient(server.url).post("/v1/completions", BODY, lambda _: None)


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(RequestError, match="not HTTP"):
            await HttpClient(f"http://127.0.0.1:{port}").get("/v1/models")


@pytest.mark.parametrize("first_answers", [1, 0])
async def test_a_request_is_sent_again_only_where_a_kept_connection_ends_without_a_byte(first_answers: int) -> None:
    talks: list[asyncio.Task[None] | None] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):  # the client has what it wants
            for _ in range(first_answers):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as other:
        async with HttpClient(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}") as client:
            with nullcontext() if first_answers else pytest.raises(RequestError, match="before the response ended"):
                for _ in range(3):
                    assert (await client.get("/v1/models")).status == 200
        await asyncio.gather(*(task for task in talks if task))
    assert len(talks) == (3 if first_answers else 1)


async def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and never listens
        with pytest.raises(RequestError, match=r"no connection to 127\.0\.0\.1"):
            await HttpClient(f"http://127.0.0.1:{held.getsockname()[1]}").get("/v1/models")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_base_url_may_end_in_v1(server: ScriptedServer, suffix: str) -> None:
    async with HttpClient(server.url + suffix, api_key="secret") as client:
        await client.post("/v1/completions", BODY)
    assert server.asked[0]["path"] == "/v1/completions"
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="url="):
        HttpClient(url)
