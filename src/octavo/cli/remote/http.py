"""HTTP/1.1 over asyncio, for a client that shares its cores with the server it measures.

A piece of a body reaches its reader inside the callback that took it off the socket: no queue, no task switch. One
connection carries one request at a time and is kept for the next.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from octavo.errors import InvalidParameterError, RequestError

# Servers close connections that lie idle, five seconds being usual; one that has begun to close must not be used.
MAX_IDLE_S = 2.0

Headers = dict[str, str]  # names in lower case
OnBody = Callable[[bytes], None]


@dataclass(kw_only=True, slots=True)
class Response:
    """What a server answered. The body of a success is empty where `on_body` took it piece by piece."""

    status: int = 0
    headers: Headers = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


class HttpClient:
    """Sends requests to one server, over as many connections as there are requests at once.

    `base_url` may end in `/v1`, as other clients want it, or not: paths that are asked for begin with `/v1` anyway.

    Raises:
        InvalidParameterError: for a URL that is not http or https with a host.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = parse_base_url(base_url)
        self._host: Final = str(parts.hostname)
        self._is_tls: Final = parts.scheme == "https"
        self._port: Final = parts.port or (443 if self._is_tls else 80)
        self._prefix: Final = parts.path.rstrip("/").removesuffix("/v1")
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: application/json, text/event-stream"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        self._head: Final = "".join(f"{line}\r\n" for line in lines)
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Return the answer to a GET.

        Raises:
            RequestError: when the server cannot be reached or ends the connection early.
        """
        return await self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None) -> Response:
        """Send JSON; return the answer when it is complete, its body handed to `on_body` as it came if it is a success.

        Cancelling closes the connection, which tells the server that nobody listens any more.

        Raises:
            RequestError: when the server cannot be reached or ends the connection early.
        """
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + body, on_body)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections that wait for a next request."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets are closed by the event loop, which may end right after this

    async def _exchange(self, message: bytes, on_body: OnBody | None) -> Response:
        connection = self._take_idle() or await self._connect()
        try:
            response = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        return response

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._is_tls or None)
        except OSError as error:
            raise RequestError(f"no connection to {self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with the callbacks of asyncio and, named `on_...`, of httptools."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._response = Response()
        self._done: asyncio.Future[Response] | None = None
        self._on_body: OnBody | None = None

    def exchange(self, message: bytes, on_body: OnBody | None) -> "asyncio.Future[Response]":
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            self._fail("the server has closed the connection")
        else:
            self._transport.write(message)
        return self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its bases
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return self.close()  # nobody asked
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(f"the server ended the connection before its answer was complete{f': {exc}' if exc else ''}")

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
        if self._response.status < 200:  # "continue" and the like: the answer is still to come
            self._response = Response()
            return
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestError(why))


def parse_base_url(url: str) -> SplitResult:
    """Return the parts of an http or https URL with a host.

    Raises:
        InvalidParameterError: for any other text.
    """
    wanted = "must be like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidParameterError("url", url, f"{wanted} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameterError("url", url, wanted)
    return parts
