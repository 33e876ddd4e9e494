"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): our own ASGI response.

Frames are written the moment their source has news, by whoever brings the news: a token costs no task and no wake-up.
Only where the client is behind does a task wait for it, and what comes meanwhile is merged.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError, as_api_error
from octavo.server.middleware.exchange import Exchange

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients pass over it
PING_S = 10.0  # silence that proxies and clients are spared
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(json: bytes) -> bytes:
    """Return one event."""
    return b"data: " + json + b"\n\n"


class FrameSource(Protocol):
    """Makes the frames of one stream."""

    def start(self, notify: Callable[[], None]) -> None:
        """Begin; call `notify`, in the event loop, whenever there may be something to take."""
        ...

    def take(self) -> bytes:
        """Return the frames of all that is new, of which there may be none."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether everything has been taken."""
        ...

    def count_tokens(self) -> tuple[int, int]:
        """Return how many tokens went in and came out so far."""
        ...

    def close(self) -> None:
        """Stop, whether it is over or not. Called once, after `start` or without it."""
        ...


class EventStreamResponse(Response):
    """Sends frames as they are made. When the client leaves, the source is closed, which aborts its requests.

    Nothing is sent before the first frame: what goes wrong until then is raised and becomes an ordinary answer. What
    goes wrong later becomes a frame with an error, and ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, source: FrameSource) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._woken = asyncio.Event()  # there is something to do for the task
        self._is_open = False  # headers are out: news is written at once
        self._is_quiet = True  # nothing was written since the timer last looked
        self._write: asyncio.Task[None] | None = None  # one that waits for the client
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._exchange = Exchange.of(scope)
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        leaving.add_done_callback(lambda _: self._woken.set())
        pinging = asyncio.ensure_future(self._ping())
        try:
            self._source.start(self._on_news)
            first = await self._first_frames(leaving)
            if not leaving.done():
                await self._stream(first, leaving)
        finally:
            self._source.close()
            await cancel(leaving, pinging, *([self._write] if self._write else []))

    async def _first_frames(self, leaving: "asyncio.Future[None]") -> bytes:
        """Wait for something to send: frames, or a sign of life where they are long in coming."""
        while not leaving.done():
            data = self._source.take()
            if data or self._source.is_over:
                return data
            try:
                async with asyncio.timeout(PING_S):
                    await self._woken.wait()
            except TimeoutError:
                return PING
            self._woken.clear()
        return b""

    async def _stream(self, first: bytes, leaving: "asyncio.Future[None]") -> None:
        await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        self._is_open = True
        self._on_news()  # what came meanwhile
        while not (leaving.done() or self._error or (self._source.is_over and self._write is None)):
            self._woken.clear()
            await self._woken.wait()
        last = b"" if self._error is None else frame(as_api_error(self._error).body) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _on_news(self) -> None:
        """Write what is new, unless the client is behind with what it has got. Raises nothing: the engine calls."""
        if not self._is_open:
            self._woken.set()
        elif self._write is None and self._error is None:
            try:
                self._put(self._source.take())
            except Exception as error:  # noqa: BLE001 - the task tells the client, and the log
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
        self._on_news()

    async def _ping(self) -> None:
        """Say something where nothing was said for a while."""
        while True:
            await asyncio.sleep(PING_S)
            if self._is_open and self._is_quiet and self._write is None:
                self._put(PING)
            self._is_quiet = True


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: "asyncio.Future[None]") -> None:
    """End tasks and wait until they have. What they raised is not for us."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def start_at_once(work: Awaitable[None]) -> "asyncio.Task[None] | None":
    """Return None when it has ended already; otherwise a task for the rest of it. What it raises at once is raised."""
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
    """Wait for what the work waits for, then let it go on; an exception on the way is its own."""
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancelled task, as a rule; the work has to know
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(None)
    except StopIteration:
        return
