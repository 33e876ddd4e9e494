"""Event streams without an engine: when frames go out, what a slow, a silent and a leaving client do to them."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest
from starlette.types import Message, Scope

from octavo.server.http import sse
from octavo.server.http.errors import DONE, ApiError
from octavo.server.http.exchange import Exchange
from octavo.server.http.sse import PING, EventStreamResponse, start_at_once


class Script:
    """A source that gives what a test puts into it."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.error: Exception | None = None
        self.is_over = False
        self.is_closed = False
        self._is_ending = False

    def start(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def put(self, data: bytes, *, is_last: bool = False) -> None:
        self.frames.append(data)
        self._is_ending = is_last
        self.notify()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.notify()

    def take(self) -> bytes:
        if self.error is not None:
            raise self.error
        taken, self.frames = b"".join(self.frames), []
        self.is_over = self._is_ending
        return taken

    def count_tokens(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.is_closed = True


class Connection:
    """Both ends of an ASGI connection; `is_free` lets the client read."""

    def __init__(self, source: Script) -> None:
        self.sent: list[Message] = []
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.has_left = asyncio.Event()
        scope: Scope = {"type": "http", "path": "/v1/completions"}
        Exchange(scope, self.receive, self.send, "id")
        self.task = asyncio.ensure_future(EventStreamResponse(source)(scope, self.receive, self.send))

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self.is_free.is_set():
            await self.is_free.wait()
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def script() -> Script:
    return Script()


@pytest.fixture
async def connection(script: Script) -> AsyncGenerator[Connection, None]:
    made = Connection(script)
    await settle()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert script.is_closed


async def test_nothing_is_sent_before_the_first_frame(script: Script, connection: Connection) -> None:
    assert connection.sent == []
    script.put(b"one")
    await settle()
    assert [message["type"] for message in connection.sent] == ["http.response.start", "http.response.body"]
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


async def test_frames_go_out_at_once_and_the_end_ends_it(script: Script, connection: Connection) -> None:
    script.put(b"one")
    await settle()
    script.put(b"two")
    assert connection.bodies == [b"one", b"two"], "written by whoever brought the news"
    script.put(b"three", is_last=True)
    await connection.task
    assert connection.bodies == [b"one", b"two", b"three", b""]
    assert connection.sent[-1]["more_body"] is False


async def test_what_comes_while_the_client_is_behind_is_merged(script: Script, connection: Connection) -> None:
    script.put(b"one")
    await settle()
    connection.is_free.clear()
    for data in (b"2", b"3", b"4"):
        script.put(data)
    await settle()
    assert connection.bodies == [b"one"]
    connection.is_free.set()
    await settle()
    assert connection.bodies == [b"one", b"2", b"34"]
    connection.is_free.clear()
    script.put(b"5")
    script.put(b"6", is_last=True)
    await settle()
    connection.is_free.set()
    await connection.task
    assert b"".join(connection.bodies) == b"one23456"


async def test_an_error_before_the_first_frame_is_raised(script: Script, connection: Connection) -> None:
    script.fail(ApiError(503, "gone"))
    with pytest.raises(ApiError, match="gone"):
        await connection.task
    assert connection.sent == []


async def test_an_error_later_is_a_frame_and_ends_the_stream(script: Script, connection: Connection) -> None:
    script.put(b"one")
    await settle()
    script.fail(ApiError(500, "broken", code="engine_error"))
    await connection.task
    assert connection.bodies[1].startswith(b'data: {"error":{"message":"broken"')
    assert connection.bodies[1].endswith(b"\n\n" + DONE)
    assert connection.sent[-1]["more_body"] is False


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_closes_the_source(script: Script, connection: Connection, has_begun: bool) -> None:
    if has_begun:
        script.put(b"one")
        await settle()
    connection.has_left.set()
    await connection.task
    assert script.is_closed


async def test_a_client_that_leaves_while_it_is_behind_closes_the_source(
    script: Script, connection: Connection
) -> None:
    script.put(b"one")
    await settle()
    connection.is_free.clear()
    script.put(b"two")
    connection.has_left.set()
    await settle()
    connection.is_free.set()
    await connection.task
    assert script.is_closed


async def test_silence_is_broken_before_and_after_the_first_frame(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.01)
    connection = Connection(script)
    while len(connection.bodies) < 2:
        await asyncio.sleep(0.01)
    script.put(b"one", is_last=True)
    await connection.task
    assert connection.bodies[0] == connection.bodies[1] == PING
    assert connection.bodies[-2:] == [b"one", b""]


async def test_work_that_need_not_wait_is_done_at_once() -> None:
    done = []

    async def work(gate: asyncio.Event) -> None:
        done.append("begun")
        if not gate.is_set():
            await gate.wait()
        done.append("ended")

    gate = asyncio.Event()
    gate.set()
    assert start_at_once(work(gate)) is None
    assert done == ["begun", "ended"]
    gate.clear()
    task = start_at_once(work(gate))
    assert task is not None
    assert done[2:] == ["begun"]
    gate.set()
    await task
    assert done[2:] == ["begun", "ended"]


async def test_work_under_way_can_be_cancelled_and_can_fail() -> None:
    seen = []

    async def work(gate: asyncio.Event) -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        raise ValueError("after the wait")

    task = start_at_once(work(asyncio.Event()))
    assert task is not None
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
    gate = asyncio.Event()
    failing = start_at_once(work(gate))
    assert failing is not None
    gate.set()
    with pytest.raises(ValueError, match="after the wait"):
        await failing
