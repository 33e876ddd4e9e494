"""The outermost middleware: gives each request an id, tracks its response, counts it and logs it.

An exception that no inner layer has turned into a response becomes a 500 here.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidParameterError
from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError, as_api_error
from octavo.server.middleware.replies import OPEN_PATHS, route_path, send_error

if TYPE_CHECKING:
    from octavo.server.middleware.admission import Ticket

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("octavo.access")

# Ids go into logs and headers, so their length and characters are bounded.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
WARNINGS_HEADER = b"x-octavo-warnings"
_MAX_WARNINGS_BYTES = 2048  # of the header
_NUMBER = re.compile(r"\d+")
_MAX_REMEMBERED = 1000  # warnings, each of which is logged once
CLIENT_LEFT = 499  # status in log and metrics if the client disconnected before a response

_KEY = "exchange"


@dataclass(slots=True)
class Exchange:
    """One HTTP request and its response, as recorded by the access log and the metrics.

    Stored in `scope["state"]`; inner middleware adds what it knows. Changed only in the event loop.
    """

    request_id: str
    direct_send: Send  # the server's own, past all middleware; see `send_body`
    started_s: float = field(default_factory=time.monotonic)
    status: int | None = None  # None until the response has begun
    is_event_stream: bool = False
    is_complete: bool = False
    was_abandoned: bool = False  # by the client, before the end of the response
    num_bytes_sent: int = 0
    warnings: list[str] = field(default_factory=list)  # parts of the request that have no effect
    count_tokens: Callable[[], tuple[int, int]] | None = None  # of the prompt, of the output so far
    ticket: "Ticket | None" = None
    end_error: ApiError | None = None  # why the request was ended early, other than by its deadline
    _timeout: asyncio.Timeout | None = None

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        """Return the exchange of a scope."""
        exchange = scope["state"][_KEY]
        assert isinstance(exchange, Exchange)
        return exchange

    def attach(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_KEY] = self

    def send_body(self, data: bytes) -> Awaitable[None]:
        """Send more of a body, bypassing the middleware: it would add nothing, and cost every token."""
        self.num_bytes_sent += len(data)
        return self.direct_send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def start_timeout(self, timeout: asyncio.Timeout) -> None:
        """Set the timeout that `limit_to` and `end_now` shorten."""
        self._timeout = timeout

    def limit_to(self, seconds: float) -> None:
        """End the request `seconds` after it arrived, unless another limit is earlier.

        Raises:
            InvalidParameterError: not a number greater than 0.
        """
        if not 0.0 < seconds < float("inf"):
            raise InvalidParameterError("timeout", seconds, "a finite number of seconds greater than 0")
        assert self._timeout is not None, "only requests that the deadline middleware has seen"
        end_s = asyncio.get_running_loop().time() + seconds - self.elapsed_s
        current_s = self._timeout.when()
        self._timeout.reschedule(end_s if current_s is None else min(end_s, current_s))

    def end_now(self, error: ApiError) -> None:
        """Cancel the request with this error."""
        assert self._timeout is not None, "only requests that the deadline middleware has seen"
        if not self._timeout.expired():  # else it is ending already
            self.end_error = error
            self._timeout.reschedule(asyncio.get_running_loop().time())


class ExchangeMiddleware:
    """Echoes the client's `X-Request-Id` if it is valid; otherwise generates one."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, *, logs_access: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._logs_access = logs_access
        self._known_warnings: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id_of(scope["headers"]), send)
        exchange.attach(scope)
        self._metrics.num_in_flight += 1
        watched_send = _watching_send(send, exchange, has_body=scope["method"] != "HEAD")
        try:
            await self._app(scope, _watching_receive(receive, exchange), watched_send)
        except Exception as error:
            if exchange.status is not None and not exchange.is_complete:
                raise  # part of the response is sent: uvicorn logs this and closes the connection
            if exchange.status is None:
                await send_error(watched_send, as_api_error(error))
            # else: starlette has sent a 500 and re-raises for outer layers to see
        finally:
            self._conclude(scope, exchange)

    def _conclude(self, scope: Scope, exchange: Exchange) -> None:
        status = exchange.status or CLIENT_LEFT
        self._metrics.num_in_flight -= 1
        self._metrics.responses[status] += 1
        route = getattr(scope.get("route"), "path", "none")  # what no route answers has any path
        self._metrics.requests[scope["method"], route, f"{status // 100}xx"] += 1
        self._metrics.num_bytes_sent += exchange.num_bytes_sent
        self._metrics.num_client_aborts += exchange.was_abandoned
        self._log_warnings(exchange)
        if self._logs_access:
            log_access(scope, exchange, status)

    def _log_warnings(self, exchange: Exchange) -> None:
        """Log what is new, whatever its numbers: a client repeats its mistakes with every request."""
        for text in exchange.warnings:
            kind = _NUMBER.sub("0", text)
            if kind not in self._known_warnings and len(self._known_warnings) < _MAX_REMEMBERED:
                self._known_warnings.add(kind)
                logger.warning("%s (request %s; logged once)", text, exchange.request_id)


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the client's id for its request, or a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return f"req-{uuid.uuid4().hex}"


def log_access(scope: Scope, exchange: Exchange, status: int) -> None:
    """Log one line; the JSON format gets the same facts as fields."""
    client = scope.get("client")
    tokens = exchange.count_tokens() if exchange.count_tokens is not None else None
    facts = {
        "client": client[0] if client else "-",
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(exchange.elapsed_s * 1000, 1),
        "bytes": exchange.num_bytes_sent,
        "prompt_tokens": tokens and tokens[0],
        "completion_tokens": tokens and tokens[1],
        "request_id": exchange.request_id,
        "client_left": exchange.was_abandoned or None,
    }
    known = {name: fact for name, fact in facts.items() if fact is not None}
    rest = " ".join(f"{name}={known[name]}" for name in list(known)[4:])
    line = (known["client"], known["method"], repr(known["path"])[1:-1], status, rest)
    level = logging.DEBUG if route_path(scope) in OPEN_PATHS else logging.INFO  # probes are frequent
    access_logger.log(level, "%s %s %s %s %s", *line, extra={"facts": known})


def _watching_receive(receive: Receive, exchange: Exchange) -> Receive:
    async def watched() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not exchange.is_complete:
            exchange.was_abandoned = True
        return message

    return watched


def _watching_send(send: Send, exchange: Exchange, *, has_body: bool) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.body":
            exchange.num_bytes_sent += len(message.get("body", b"")) if has_body else 0
            exchange.is_complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = list(message.get("headers", ()))
            exchange.is_event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            headers.append((b"x-request-id", exchange.request_id.encode()))
            if exchange.warnings:
                text = " | ".join(dict.fromkeys(exchange.warnings)).encode("ascii", "backslashreplace")
                headers.append((WARNINGS_HEADER, text[:_MAX_WARNINGS_BYTES]))
            message = {**message, "headers": headers}
        await send(message)

    return watched
