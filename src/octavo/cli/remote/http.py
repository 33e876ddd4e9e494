"""HTTP/1.1 over asyncio: requests to one server over pooled connections."""

import asyncio
import contextlib
import time
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from octavo.cli.remote.connection import Connection, OnBody, Response, UnansweredError
from octavo.errors import InvalidParameterError, RequestError

# Servers close idle connections, typically after five seconds; one that may be closing must not be reused.
MAX_IDLE_S = 2.0


class HttpClient:
    """Sends requests to one server, over as many connections as there are concurrent requests.

    `base_url` may end in `/v1` or not; requested paths start with `/v1` either way.

    Raises:
        InvalidParameterError: the URL is not http or https with a host.
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
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Response:
        """Send a GET request and return the response.

        Raises:
            RequestError: the server cannot be reached or closes the connection early.
        """
        return await self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None) -> Response:
        """Send JSON and return the complete response. The body of a success is passed to `on_body` in chunks.

        Cancellation closes the connection, which makes the server abort the request.

        Raises:
            RequestError: the server cannot be reached or closes the connection early.
        """
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + body, on_body)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets are closed by the event loop, which may stop right after this

    async def _exchange(self, message: bytes, on_body: OnBody | None) -> Response:
        # A server may close an idle connection just as it is reused; then it has not seen the request.
        if connection := self._take_idle():
            with contextlib.suppress(UnansweredError):
                return await self._send(connection, message, on_body)
        return await self._send(await self._connect(), message, on_body)

    async def _send(self, connection: Connection, message: bytes, on_body: OnBody | None) -> Response:
        try:
            response = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        return response

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._is_tls or None)
        except OSError as error:
            raise RequestError(f"no connection to {self._host}:{self._port}: {error}") from error
        return connection


def parse_base_url(url: str) -> SplitResult:
    """Return the parts of an http or https URL with a host.

    Raises:
        InvalidParameterError: not such a URL.
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
