"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) as our own ASGI response.

Frames are written as soon as their source has something new, in the engine's callback: a token costs no task and no
wake-up. Only when the client falls behind does a task wait for it; frames are merged meanwhile.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.http.errors import ApiError, as_api_error, error_frames
from octavo.server.http.exchange import CLIENT_LEFT, Exchange, json_response, route_path

T = TypeVar("T")

PING = b": ping\n\n"  # a comment, which clients ignore
PING_S = 10.0  # keep-alive interval, for proxies and clients that time out


class FrameSource(Protocol):
    """Makes the frames of one stream."""

    def start(self, notify: Callable[[], None]) -> None:
        """Start; call `notify`, in the event loop, whenever there may be frames to take."""

    def take(self) -> bytes:
        """Return the frames of everything new; empty if there are none."""

    @property
    def is_over(self) -> bool:
        """Whether everything has been taken."""

    def count_tokens(self) -> tuple[int, int]:
        """Return the prompt and output tokens so far."""

    def close(self) -> None:
        """Stop, finished or not. Called once, with or without `start`."""


@runtime_checkable
class OwnEnding(Protocol):
    """A source whose streams do not fail as other streams of their route."""

    def ending(self, error: ApiError) -> bytes:
        """Return the end of the stream that fails; empty: it ends as others do."""


class EventStreamResponse(Response):
    """Sends frames as they are produced. When the client disconnects, the source is closed, which aborts its requests.

    Nothing is sent before the first frame: until then, errors are raised and become an ordinary error response. Later
    ones are sent as an error frame, and end the stream.
    """

    media_type = "text/event-stream"
    ping = PING  # empty: silence is not broken

    def __init__(self, source: FrameSource) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._woken = asyncio.Event()  # the task has something to do
        self._is_open = False  # headers are out: new frames are written at once
        self._is_quiet = True  # nothing was written since the timer last looked
        self._write: asyncio.Task[None] | None = None  # one that waits for the client
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._exchange = Exchange.in_scope(scope)
        self._exchange.last_words = self.last_words
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        leaving.add_done_callback(lambda _: self._woken.set())
        pinging = asyncio.ensure_future(self._ping())
        try:
            self._source.start(self._on_update)
            first = await self._first_frames(leaving)
            if not leaving.done():
                await self._stream(first, leaving)
        finally:
            self._source.close()
            tasks = [task for task in (leaving, pinging, self._write) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def last_words(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails after it has begun."""
        if isinstance(self._source, OwnEnding) and (end := self._source.ending(error)):
            return end
        return error_frames(error, route_path(self._exchange.scope))

    async def _first_frames(self, leaving: "asyncio.Future[None]") -> bytes:
        """Wait for the first frames; return a ping if they take long."""
        while not leaving.done():
            data = self._source.take()
            if data or self._source.is_over:
                return data
            try:
                async with asyncio.timeout(PING_S):
                    await self._woken.wait()
            except TimeoutError:
                return self.ping
            self._woken.clear()
        return b""

    async def _stream(self, first: bytes, leaving: "asyncio.Future[None]") -> None:
        await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        self._is_open = True
        self._on_update()  # frames that arrived meanwhile
        while not (leaving.done() or self._error or (self._source.is_over and self._write is None)):
            self._woken.clear()
            await self._woken.wait()
        last = b"" if self._error is None else self.last_words(as_api_error(self._error))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _on_update(self) -> None:
        """Write what is new, unless the client has fallen behind. Never raises, as the engine calls it."""
        if not self._is_open:
            self._woken.set()
        elif self._write is None and self._error is None:
            try:
                self._put(self._source.take())
            except Exception as error:  # noqa: BLE001 - the task reports it to client and log
                self._error = error
            if self._error is not None or self._source.is_over:
                self._woken.set()

    def _put(self, data: bytes) -> None:
        if not data:
            return
        self._is_quiet = False
        self._write = start_at_once(self._exchange.send_body(data))
        if self._write is not None:
            self._write.add_done_callback(self._on_caught_up)

    def _on_caught_up(self, write: "asyncio.Task[None]") -> None:
        self._write = None
        if not write.cancelled() and (error := write.exception()) is not None:
            self._error = error if isinstance(error, Exception) else ApiError(500, "Internal server error.")
        self._on_update()

    async def _ping(self) -> None:
        """Send a ping after each silence of `PING_S`."""
        while True:
            await asyncio.sleep(PING_S)
            if self._is_open and self._is_quiet and self._write is None:
                self._put(self.ping)
            self._is_quiet = True


@runtime_checkable
class CountsTokens(Protocol):
    """Any usage on the wire."""

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the output."""


async def respond(
    request: Request,
    work: Awaitable[msgspec.Struct | FrameSource],
    stream: type[EventStreamResponse] = EventStreamResponse,
) -> Response:
    """Return what `work` makes: one object, or a stream that has not started. Cancelled when the client disconnects."""
    exchange, reply = Exchange.in_scope(request.scope), await unless_client_leaves(request, work)
    if reply is None:
        return Response(status_code=CLIENT_LEFT)
    if not isinstance(reply, msgspec.Struct):
        exchange.count_tokens = reply.count_tokens
        return stream(reply)
    if isinstance(usage := getattr(reply, "usage", None), CountsTokens):
        exchange.count_tokens = usage.count_tokens
    return json_response(reply)


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`; cancel it and return None if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def start_at_once(work: Awaitable[None]) -> "asyncio.Task[None] | None":
    """Run a coroutine until it first waits, which few socket writes do; return a task for the rest, or None."""
    steps = work.__await__()
    try:
        waits_for = steps.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_rest(steps, waits_for))


async def _rest(steps: Generator[Any, Any, None], waits_for: object) -> None:
    await _go_on(steps, waits_for)


@types.coroutine
def _go_on(steps: Generator[Any, Any, None], waits_for: object) -> Generator[object, None, None]:
    """Await what the coroutine awaits and resume it; exceptions are passed into it."""
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - usually a cancellation, which the coroutine must see
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(None)
    except StopIteration:
        return
