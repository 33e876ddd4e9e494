"""The server without a model: middleware and uvicorn as they are, around a few routes that a test can steer."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2 as httpx
from starlette.types import Receive, Scope, Send

from octavo.metrics.collect import HttpMetrics
from octavo.server.app import DrainingServer, make_server
from octavo.server.http.exchange import Exchange
from octavo.server.http.sse import EventStreamResponse
from octavo.server.listen import listening, load_api_keys, load_tenants, url_of
from octavo.server.settings import resolve_settings

HELD = -1.0  # seconds of a request that waits for `TinyServer.released`: a busy machine cannot end it too early


async def tiny_app(scope: Scope, receive: Receive, send: Send, *, released: asyncio.Semaphore) -> None:
    """`/v1/wait` waits as long as the body says, or until its turn to go, `/v1/stream` streams for ever, `/v1/fail`
    fails; others echo."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    exchange = Exchange.in_scope(scope)
    body = exchange.body
    request = json.loads(body) if body else {}
    exchange.limit_to(request.get("timeout"))
    exchange.num_samples = request.get("n", 1)
    match scope["path"].rpartition("/")[2]:
        case "fail":
            raise RuntimeError("secret path /etc/passwd")
        case "wait":
            await (released.acquire() if request["seconds"] == HELD else asyncio.sleep(request["seconds"]))
        case "stream":
            await EventStreamResponse(Endless(request.get("frame_bytes", 10)))(scope, receive, send)
            return
    exchange.count_tokens = lambda: (3, 4)
    await reply(send, {"num_bytes": len(body)})


async def reply(send: Send, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Endless:
    """A stream that goes on for ever."""

    is_over = False

    def __init__(self, frame_bytes: int) -> None:
        self._frame = b"data: {}".ljust(frame_bytes - 2) + b"\n\n"

    def start(self, notify: Callable[[], None]) -> None:
        self._ticking = asyncio.create_task(self._tick(notify))

    async def _tick(self, notify: Callable[[], None]) -> None:
        while True:
            notify()
            await asyncio.sleep(0.01)

    def take(self) -> bytes:
        return self._frame

    def count_tokens(self) -> tuple[int, int]:
        return 3, 4

    def close(self) -> None:
        self._ticking.cancel()


@dataclass(frozen=True, slots=True)
class TinyServer:
    """One that runs in this event loop."""

    client: httpx.AsyncClient
    port: int
    metrics: HttpMetrics
    server: DrainingServer
    running: "asyncio.Task[None]"  # ends with the server
    released: asyncio.Semaphore  # lets those that are HELD go, one by one

    async def send_raw(self, *pieces: bytes, pause_s: float = 0.0) -> str:
        """Send bytes as they are, until the server closes; return all that came back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received: list[bytes] = []

        async def read() -> None:
            with suppress(ConnectionResetError):  # what is written to a server that has just closed is refused
                while piece := await reader.read(65536):
                    received.append(piece)

        reading = asyncio.create_task(asyncio.wait_for(read(), 10.0))
        for piece in pieces:
            if not reading.done():
                writer.write(piece)
                await asyncio.sleep(pause_s)
        await reading
        writer.close()
        return b"".join(received).decode()


@asynccontextmanager
async def tiny_server(**options: Any) -> AsyncGenerator[TinyServer, None]:
    """Options are those of `ServerArgs` and `EngineArgs`."""
    settings = resolve_settings({"port": 0, **options}, {})
    metrics = HttpMetrics()
    tenants = load_tenants(settings, metrics)
    released = asyncio.Semaphore(0)
    app = partial(tiny_app, released=released)
    server = make_server(app, settings, load_api_keys(settings.server), metrics, tenants)
    with listening(settings.server) as listener:
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = url_of(listener, settings.server)
        async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
            yield TinyServer(client, listener.getsockname()[1], metrics, server, running, released)
        server.stop()
        await running
