"""Routes as tables: what FastAPI calls, and what the OpenAPI page says of them. And what all handlers end with."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from fastapi import FastAPI, Request, Response

from octavo.server.http.errors import ErrorReply
from octavo.server.http.exchange import CLIENT_LEFT, Exchange
from octavo.server.http.sse import EventStreamResponse, FrameSource, wait_for_disconnect

T = TypeVar("T")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


@runtime_checkable
class CountsTokens(Protocol):
    """Any usage on the wire."""

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the output."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route whose handler takes the raw request, so FastAPI knows neither its body nor its reply."""

    method: str
    path: str
    handler: Callable[..., Any]
    body: Any = None  # type of the JSON; or a dictionary, what the page says of a body that is none
    reply: Any = None  # type of the JSON
    stream: str | None = None  # media type of a reply that comes in pieces
    examples: Mapping[str, object] = field(default_factory=dict)  # bodies to try out


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Routes of one heading of the OpenAPI page, whose errors have one shape."""

    tag: str
    error: type
    routes: Sequence[ApiRoute]


def add_routes(app: FastAPI, routes: Sequence[ApiRoute], tag: str = "OpenAI", error: type = ErrorReply) -> None:
    """Let an application serve routes; what answers GET answers HEAD, too, but for streams."""
    for route in routes:
        app.add_api_route(route.path, route.handler, methods=[route.method], response_model=None)
        if route.method == "GET" and route.stream is None:
            app.add_api_route(route.path, route.handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.state.tables = [*getattr(app.state, "tables", ()), RouteTable(tag, error, routes)]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


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
