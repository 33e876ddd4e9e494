"""One HTTP/1.1 connection, for a client that shares its cores with the server it measures.

Body chunks are delivered in the callback that read them from the socket: no queue, no task switch.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from octavo.errors import RequestError

Headers = dict[str, str]  # names are lower case
OnBody = Callable[[bytes], None]


@dataclass(kw_only=True, slots=True)
class Response:
    """A server's response. The body of a success is empty if `on_body` received it in chunks."""

    status: int = 0
    headers: Headers = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


class UnansweredError(RequestError):
    """The connection closed before the first byte of a response."""


class Connection(asyncio.Protocol):
    """Handles one request at a time. Implements the callbacks of asyncio and, as `on_...`, of httptools."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._response = Response()
        self._done: asyncio.Future[Response] | None = None
        self._has_answer = False
        self._on_body: OnBody | None = None

    def exchange(self, message: bytes, on_body: OnBody | None) -> "asyncio.Future[Response]":
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._has_answer = False
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            self._fail(UnansweredError("the server has closed the connection"))
        else:
            self._transport.write(message)
        return self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return self.close()  # no request is pending
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestError(f"the server's response is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        kind = RequestError if self._has_answer else UnansweredError
        self._fail(kind(f"the server closed the connection before the response ended{f': {exc}' if exc else ''}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._on_body is not None and self._response.is_ok:
            self._on_body(piece)
        else:
            self._response.body += piece

    def on_message_complete(self) -> None:
        if self._response.status < 200:  # 1xx: the final response follows
            self._response = Response()
            return
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, error: RequestError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
