"""uvicorn's HTTP protocol with limits that it lacks: header size, and timeouts for slow clients.

Requests rejected here never reach the application, so errors are written to the connection directly, in the usual
format.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. `limited_protocol` returns a subclass with limits."""

    limits: ClassVar[ServerArgs]  # of the size of a head, of the time for it and its body, of the time to write
    metrics: ClassVar[HttpMetrics]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads_head = True  # else a body, or nothing while a request is served
        self._num_raw_bytes = 0  # received while the head is incomplete
        self._num_head_bytes = 0  # of the head's complete lines
        self._is_refused = False
        self._offers_upgrade = False  # to another protocol, as Java's client does with every request
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._time_reading(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._time_reading(False)
        self._time_writing(False)
        super().connection_lost(exc)

    def _time_reading(self, is_on: bool) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = self.loop.call_later(self.limits.read_timeout_s, self._on_timeout) if is_on else None

    def _time_writing(self, is_on: bool) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        timeout_s = self.limits.write_timeout_s
        self._write_timer = self.loop.call_later(timeout_s, self._on_write_timeout) if is_on else None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._reads_head:
            self._num_raw_bytes += len(data)
            if self._read_timer is None:
                self._time_reading(True)
        self._parse(data)
        if self._reads_head:
            self._limit_head(self._num_raw_bytes)

    def _limit_head(self, num_bytes: int) -> None:
        limit = self.limits.max_header_bytes
        if num_bytes > limit:
            self._refuse(ApiError(431, f"The request headers are larger than {limit} bytes.", code="head_too_large"))

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self._offers_upgrade and not self._is_refused:
                self._parse(self._decline_upgrade() + data[offer.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_upgrade(self) -> bytes:
        """Return the head without the offer, for a new parser: the old one takes the body for the other protocol."""
        self._offers_upgrade = False
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                head.append(b"connection: " + b", ".join(t for t in tokens if t.lower() not in _UPGRADE_HEADERS))
            elif name not in _UPGRADE_HEADERS:
                head.append(b"%b: %b" % (name, value))
        self.parser = HttpRequestParser(self)
        return b"\r\n".join(head) + b"\r\n\r\n"

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value) + 4  # colon, blank, line end
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._limit_head(self._num_head_bytes)
        self._offers_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if self._offers_upgrade:  # the request is read again without it
            return
        self._reads_head = False
        if not self._is_refused:
            self._time_reading(True)
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                speak_http_1_0(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._time_reading(False)
        self._reads_head = True
        self._num_raw_bytes = self._num_head_bytes = 0
        if not self._is_refused and not self._offers_upgrade:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_writing(True)

    def resume_writing(self) -> None:
        self._time_writing(False)
        super().resume_writing()

    def _on_write_timeout(self) -> None:
        """Drop a client that does not read; writers see a disconnect."""
        self.metrics.rejections["slow_reader"] += 1
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg, code="invalid_http"))

    def _on_timeout(self) -> None:
        """The rest of a head or body did not arrive in time."""
        if self.flow.read_paused:  # paused by us, not by the client
            self._time_reading(True)
        elif self._reads_head and self._num_raw_bytes == 0:  # nothing was received, so there is nothing to respond to
            self.transport.close()
        else:
            message = f"The request did not arrive within {self.limits.read_timeout_s:g} s."
            self._refuse(ApiError(408, message, kind="timeout_error", code="slow_request"))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, after an error response if the current request has none yet."""
        self._is_refused = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or (cycle.response_complete and self._reads_head):
            self._write(error)
        elif not cycle.response_started and not self._reads_head:  # a handler waits for a body that will not arrive
            self._write(error)
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _write(self, error: ApiError) -> None:
        status = HTTPStatus(error.status)
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(error.body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + error.body)
        client = self.client[0] if self.client else "-"
        logger.warning("%s %d %s: %s", client, error.status, error.detail.code, error.detail.message)
        assert error.detail.code is not None
        self.metrics.responses[error.status] += 1
        self.metrics.rejections[error.detail.code] += 1


def speak_http_1_0(cycle: RequestResponseCycle) -> None:
    """Let the close of the connection end a response of unknown length: HTTP/1.0 has neither chunks nor 100 Continue.

    It follows RFC 9112, section 6.3, and RFC 9110, section 10.1.1.
    """
    send, has_length = cycle.send, True

    async def send_unframed(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares them
        await send(message)

    cycle.waiting_for_100_continue = False
    cycle.send = send_unframed  # type: ignore[method-assign]  # uvicorn has no other place for it


def limited_protocol(limits: ServerArgs, metrics: HttpMetrics) -> type[LimitedHttpProtocol]:
    """Return the protocol class for uvicorn, which creates one object per connection."""
    return type("HttpProtocol", (LimitedHttpProtocol,), {"limits": limits, "metrics": metrics})
