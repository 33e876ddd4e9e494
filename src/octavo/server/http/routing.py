"""Routes as tables: what FastAPI calls, and what the OpenAPI page says of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from octavo.server.http.errors import ErrorReply

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


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
