"""Helpers of the middleware: classify requests, and reject them."""

from collections.abc import Mapping

import msgspec
from starlette.types import Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError, ErrorReply

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # load balancer probes, which have no key
API_PREFIX = "/v1/"  # a POST below this path makes the engine compute


def route_path(scope: Scope) -> str:
    """Return the path as routes see it, without the prefix that `PathMiddleware` has put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def asks_for_work(scope: Scope) -> bool:
    """True for requests that make the engine compute."""
    return scope["type"] == "http" and scope["method"] == "POST" and route_path(scope).startswith(API_PREFIX)


async def send_error(send: Send, error: ApiError) -> None:
    """Respond with an error."""
    await send_json(send, ErrorReply(error=error.detail), error.status, error.headers)


async def refuse(send: Send, error: ApiError, metrics: HttpMetrics) -> None:
    """Respond with an error, and count it under its code."""
    assert error.detail.code is not None
    metrics.rejections[error.detail.code] += 1
    await send_error(send, error)


async def send_json(send: Send, body: object, status: int, headers: Mapping[str, str]) -> None:
    """Send a JSON response where no `Response` object can be used."""
    data = msgspec.json.encode(body)
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
