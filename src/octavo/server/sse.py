"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): our own ASGI response.

One task writes what a generator of bytes yields, another waits for the client to leave. Nothing here looks at the
bytes: frames come ready made.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(json: bytes) -> bytes:
    """Return one event."""
    return b"data: " + json + b"\n\n"


class EventStreamResponse(Response):
    """Sends frames as they are made. When the client leaves, the generator is closed, which aborts its requests."""

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
        finally:
            leaving.cancel()
            writing.cancel()
            await asyncio.wait((writing, leaving))
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
