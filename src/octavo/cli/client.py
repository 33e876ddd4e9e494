"""A client for servers with the OpenAI API, over HTTP/1.1 on asyncio.

`octavo bench serve` shares its cores with the server that it measures: body chunks are delivered in the callback that
reads them from the socket, without queue and task switch, at about 30 us of CPU a token; httpx takes 140.

Sources: OpenAI's API description (`reasoning_content` and `reasoning` are extensions), and the WHATWG HTML standard,
"Server-sent events". Fields that the client does not need are ignored, and all are optional.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import InvalidParameterError, RequestError

# Servers close idle connections, typically after five seconds; one that may be closing must not be reused.
MAX_IDLE_S = 2.0

OnBody = Callable[[bytes], None]


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a chat message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One sample's part of a chunk: `delta` in chats, `text` in completions."""

    delta: Delta = msgspec.field(default_factory=Delta)
    text: str = ""

    @property
    def has_output(self) -> bool:
        delta = self.delta
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct, kw_only=True):
    """The data of one event. `error` appears alone: in error responses, and where a stream failed later."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, object] | None = None


_chunks = msgspec.json.Decoder(Chunk)


class EventReader:
    """Parses one stream of server-sent events. The result does not depend on how the bytes are split into chunks.

    Lines that end in a lone carriage return, which the standard allows and no server sends, are not split.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events completed by this piece; multiple data lines are joined with newlines."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def read_chunks(self, piece: bytes) -> Iterator[Chunk]:
        """Yield the chunks that this piece completes.

        Raises RequestError: with the server's message if it reports an error; or the data is not a chunk.
        """
        for data in self.feed(piece):
            if data == b"[DONE]":
                continue
            try:
                chunk = _chunks.decode(data)
            except msgspec.DecodeError as error:
                raise RequestError(f"the server sent an invalid event: {error}") from error
            if chunk.error is not None:
                raise RequestError(str(chunk.error.get("message") or "the server reported an error without a message"))
            yield chunk


@dataclass(kw_only=True, slots=True)
class Response:
    """A server's response. The body of a success is empty if `on_body` received it in chunks."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names are lower case
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def raise_for_status(self) -> None:
        """Raise RequestError, with status and message, if the response is an error."""
        if self.is_ok:
            return
        text: object = bytes(self.body[:200]).decode(errors="replace")
        with contextlib.suppress(msgspec.DecodeError):
            text = (_chunks.decode(self.body).error or {}).get("message", text)
        hint = " Pass the server's key with --api-key." if self.status == 401 else ""
        raise RequestError(f"HTTP {self.status}: {text}{hint}")


class _UnansweredError(RequestError):
    """The connection closed before the first byte of a response."""


class _Connection(asyncio.Protocol):
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
        self._parser, self._response = httptools.HttpResponseParser(self), Response()
        self._has_answer, self._on_body = False, on_body
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            self._fail(_UnansweredError("the server has closed the connection"))
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
        kind = RequestError if self._has_answer else _UnansweredError
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


class HttpClient:
    """Sends requests to one server, over as many connections as there are concurrent requests.

    `base_url` may end in `/v1` or not; requested paths start with `/v1` either way. Raises InvalidParameterError: the
    URL is not http or https with a host.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        wanted = "must be like http://127.0.0.1:8000"
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise InvalidParameterError("url", base_url, f"{wanted} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError("url", base_url, wanted)
        self._host: Final = parts.hostname
        self._is_tls: Final = parts.scheme == "https"
        self._port: Final = port or (443 if self._is_tls else 80)
        self._prefix: Final = parts.path.rstrip("/").removesuffix("/v1")
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: application/json, text/event-stream"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        if (parent := os.environ.get("TRACEPARENT", "")) and parent.isascii() and parent.isprintable():
            lines.append(f"traceparent: {parent}")  # the span that a program which starts this one is in
        self._head: Final = "".join(f"{line}\r\n" for line in lines)
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Send a GET request and return the response."""
        return await self._exchange("GET", path, "", b"", None)

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None) -> Response:
        """Send JSON and return the complete response. The body of a success is passed to `on_body` in chunks.

        Cancellation closes the connection, which makes the server abort the request. Raises RequestError: the server
        cannot be reached or closes the connection early.
        """
        lines = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._exchange("POST", path, lines, body, on_body)

    async def find_model(self, wanted: str | None) -> str:
        """Return the model name for requests: the wanted one, else the server's first.

        Raises RequestError: the server cannot be reached or rejects the request. InvalidParameterError: the server
        lists no models.
        """
        if wanted is not None:
            return wanted  # a server may accept names that it does not list
        response = await self.get("/v1/models")
        response.raise_for_status()
        try:
            names = [str(card["id"]) for card in json.loads(response.body)["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise RequestError(f"invalid response from /v1/models: {error!r}") from error
        if not names:
            raise InvalidParameterError("model", None, "the server lists no models; use --model")
        return names[0]

    async def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]
    ) -> AsyncIterator[tuple[str, bool]]:
        """Stream a reply: pieces of text, and whether they are reasoning. Closing the generator early cancels it.

        Raises RequestError: the server rejects the request, fails or cannot be reached.
        """
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        body = msgspec.json.encode({"model": model, "stream": True, **options, "messages": messages})
        request = asyncio.create_task(self.post("/v1/chat/completions", body, pieces.put_nowait))
        request.add_done_callback(lambda _: pieces.put_nowait(b""))
        reader = EventReader()
        try:
            while piece := await pieces.get():
                for choice in (choice for chunk in reader.read_chunks(piece) for choice in chunk.choices):
                    delta = choice.delta
                    if thought := delta.reasoning_content or delta.reasoning:
                        yield thought, True
                    if delta.content:
                        yield delta.content, False
            response = await request
            response.raise_for_status()
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise RequestError("the server did not stream its response")
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets are closed by the event loop, which may stop right after this

    async def _exchange(self, method: str, path: str, lines: str, body: bytes, on_body: OnBody | None) -> Response:
        message = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{lines}\r\n".encode() + body
        # A server may close an idle connection just as it is reused; then it has not seen the request.
        if connection := self._take_idle():
            with contextlib.suppress(_UnansweredError):
                return await self._send(connection, message, on_body)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._is_tls or None
            )
        except OSError as error:
            raise RequestError(f"no connection to {self._host}:{self._port}: {error}") from error
        return await self._send(connection, message, on_body)

    async def _send(self, connection: _Connection, message: bytes, on_body: OnBody | None) -> Response:
        try:
            response = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        return response

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                return connection
            connection.close()
        return None
