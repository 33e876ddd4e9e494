"""Ends a request at the server's time limit or the client's own, whichever comes first.

The client's is the header `X-Request-Timeout` or the body's field `timeout`, in seconds since the request arrived.
Ending cancels the request's task, which aborts it in the engine. Shutdown ends requests the same way.
"""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import InvalidParameterError
from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError, as_api_error
from octavo.server.middleware.exchange import Exchange
from octavo.server.middleware.replies import asks_for_work, refuse
from octavo.server.sse import DONE, frame

HEADER = b"x-request-timeout"


class DeadlineMiddleware:
    """Responds 408 if nothing was sent yet; a stream that has started gets an error as its last event."""

    def __init__(self, app: ASGIApp, limit_s: float | None, metrics: HttpMetrics) -> None:
        self._app = app
        self._limit_s = limit_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not asks_for_work(scope):
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        try:
            async with asyncio.timeout(self._limit_s) as timeout:
                exchange.start_timeout(timeout)
                error = _apply_header(scope, exchange)
                if error is None:
                    await self._app(scope, receive, send)
                else:
                    await refuse(send, error, self._metrics)
        except TimeoutError:
            if not timeout.expired():
                raise
            await self._end(exchange, send)

    async def _end(self, exchange: Exchange, send: Send) -> None:
        error = exchange.end_error or timed_out(exchange.elapsed_s)
        if exchange.status is None:
            await refuse(send, error, self._metrics)
        elif not exchange.is_complete:
            assert error.detail.code is not None
            self._metrics.rejections[error.detail.code] += 1
            last = frame(error.body) + DONE if exchange.is_event_stream else b""
            await send({"type": "http.response.body", "body": last})


def timed_out(elapsed_s: float) -> ApiError:
    """The same request would time out again, so clients should not retry."""
    message = f"The request reached its time limit after {elapsed_s:.1f} s."
    return ApiError(408, message, kind="timeout_error", code="request_timeout", headers={"x-should-retry": "false"})


def _apply_header(scope: Scope, exchange: Exchange) -> ApiError | None:
    """Apply the deadline in the headers, if any; return what is wrong with it."""
    for name, value in scope["headers"]:
        if name == HEADER:
            try:
                exchange.limit_to(float(value))
            except (ValueError, InvalidParameterError):
                shown = value[:50].decode("latin-1")
                limit = "must be a finite number of seconds greater than 0"
                return as_api_error(InvalidParameterError("X-Request-Timeout", shown, limit))
    return None
