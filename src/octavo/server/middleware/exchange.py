"""Outermost: gives each request its id, watches the answer go out, counts it and logs it.

An exception that nobody further in has turned into an answer becomes a 500 here.
"""

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.errors import as_api_error
from octavo.server.exchange import CLIENT_LEFT, Exchange
from octavo.server.middleware.replies import OPEN_PATHS, route_path, send_error

access_logger = logging.getLogger("octavo.access")

# Ids go into logs and headers, so what they are made of is bounded.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class ExchangeMiddleware:
    """`X-Request-Id` is echoed where the client sent a sound one, made where not."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, *, logs_access: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id_of(scope["headers"]), send)
        exchange.attach(scope)
        self._metrics.num_in_flight += 1
        watched_send = _watching_send(send, exchange)
        try:
            await self._app(scope, _watching_receive(receive, exchange), watched_send)
        except Exception as error:
            if exchange.status is not None and not exchange.is_complete:
                raise  # half an answer is out: the server logs this and closes the connection
            if exchange.status is None:
                await send_error(watched_send, as_api_error(error))
            # else: starlette has answered 500 and only shows the error to whoever is further out
        finally:
            self._conclude(scope, exchange)

    def _conclude(self, scope: Scope, exchange: Exchange) -> None:
        status = exchange.status or CLIENT_LEFT
        self._metrics.num_in_flight -= 1
        self._metrics.responses[status] += 1
        self._metrics.num_bytes_sent += exchange.num_bytes_sent
        self._metrics.num_client_aborts += exchange.was_abandoned
        if self._logs_access:
            log_access(scope, exchange, status)


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the client's id for its request, or a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return f"req-{uuid.uuid4().hex}"


def log_access(scope: Scope, exchange: Exchange, status: int) -> None:
    """Write one line; the same facts ride along as fields for the JSON format."""
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
    level = logging.DEBUG if route_path(scope) in OPEN_PATHS else logging.INFO  # probes come for ever
    access_logger.log(level, "%s %s %s %s %s", *line, extra={"facts": known})


def _watching_receive(receive: Receive, exchange: Exchange) -> Receive:
    async def watched() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not exchange.is_complete:
            exchange.was_abandoned = True
        return message

    return watched


def _watching_send(send: Send, exchange: Exchange) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.body":
            exchange.num_bytes_sent += len(message.get("body", b""))
            exchange.is_complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = list(message.get("headers", ()))
            exchange.is_event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            headers.append((b"x-request-id", exchange.request_id.encode()))
            message = {**message, "headers": headers}
        await send(message)

    return watched
