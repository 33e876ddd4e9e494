"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): our own ASGI response.

One task writes what a generator of bytes yields, another waits for the client to leave. Nothing here looks at the
bytes: frames come ready made.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import as_api_error

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients pass over it
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(json: bytes) -> bytes:
    """Return one event."""
    return b"data: " + json + b"\n\n"


class EventStreamResponse(Response):
    """Sends frames as they are made. When the client leaves, the generator is closed, which aborts its requests.

    Nothing is sent before the first frame: what goes wrong until then is raised and becomes an ordinary answer. What
    goes wrong later becomes a frame with an error, and ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await cancel(writing, leaving)

    async def _write(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            data = await anext(frames)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # noqa: BLE001 - the client is told, and the log
                data = frame(as_api_error(error).body) + DONE
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[None]) -> None:
    """End tasks and wait until they have. What they raised before is for somebody else."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
