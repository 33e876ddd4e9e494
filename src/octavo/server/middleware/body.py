"""Reads a request's whole body, within its limits, before calling the next layer.

Every route takes one JSON document, so streaming it would gain nothing. `server/http_protocol.py` limits the time in
which it must arrive.
"""

import codecs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError
from octavo.server.middleware.replies import refuse

_METHODS = ("POST", "PUT", "PATCH")


class BodyMiddleware:
    """Responds 413 to a body over the limit, declared or not, and 415 to one that is not plain JSON."""

    def __init__(self, app: ASGIApp, max_bytes: int, metrics: HttpMetrics) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS:
            await self._app(scope, receive, send)
            return
        try:
            check_headers(dict(scope["headers"]), self._max_bytes)
            body = await self._read(receive)
        except ApiError as error:
            await refuse(send, error, self._metrics)
            return
        if body is not None:
            await self._app(scope, _body_first(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left before its end."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._max_bytes:
                raise too_large(self._max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts).removeprefix(codecs.BOM_UTF8)  # which some clients put before their JSON


def check_headers(headers: dict[bytes, bytes], max_bytes: int) -> None:
    """Check the headers that describe the body.

    Raises:
        ApiError: 413 or 415.
    """
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large(max_bytes)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() or b"application/json"
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        message = f"Content-Type must be application/json, not {kind.decode('latin-1')!r}."
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        message = f"Content-Encoding {encoding.decode('latin-1')!r} is not supported: send the body uncompressed."
        raise ApiError(415, message, code="unsupported_encoding")


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")


def _body_first(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body, then the connection's messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
