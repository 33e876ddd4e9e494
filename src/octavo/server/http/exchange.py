"""One HTTP exchange: its route, id, response, warnings and end, for everything within, for the log and the metrics."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import MESSAGES, ApiError, as_api_error, error_body

if TYPE_CHECKING:
    from octavo.server.tenants.tenant import Tenant

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("octavo.access")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # load balancer probes, which have no key
STREAMS = "/v1/streams/"  # what follows is the id of a reply
CLIENT_LEFT = 499  # status in log and metrics if the client disconnected before a response
# Ids go into logs and headers, so their length and characters are bounded.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_WARNINGS_BYTES = 2048  # of the header
_NUMBER = re.compile(r"\d+")
_MAX_REMEMBERED = 1000  # warnings, each of which is logged once
_SLASHES = re.compile("//+")
_MODELS = "/models/"  # what follows is a model's name, which may be a path with slashes of its own
STREAMED_PATHS = frozenset({"/v1/files"})  # whose routes read the body themselves
# Beginnings of the routes whose POST requests make the engine compute, and so need a place in the queue.
COMPUTED = ("/v1/", "/v2/", "/rerank", "/score", "/pooling", "/api/chat", "/api/generate", "/api/embed")
# First parts of the routes below /v1: all are served without it as well, as llama.cpp's server does.
_VERSIONED = frozenset({
    "batches", "chat", "completions", "decisions", "embeddings", "files", "load_lora_adapter", "messages", "models",
    "responses", "streams", "systemone", "unload_lora_adapter",
})  # fmt: skip


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and its response. Stored in `scope["state"]`; changed only in the event loop."""

    scope: Scope
    direct_receive: Receive
    direct_send: Send  # the server's own, past all middleware; see `send_body`
    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    owner: str = ""  # of what the request stores or keeps: the digest of its API key; empty: the server has no keys
    body: bytes = b""  # of the request, complete
    status: int | None = None  # None until the response has begun
    last_words: Callable[[ApiError], bytes] | None = None  # how a stream that has begun ends in an error
    is_complete: bool = False
    was_abandoned: bool = False  # by the client, before the end of the response
    num_bytes_sent: int = 0
    warnings: list[str] = field(default_factory=list)  # parts of the request that have no effect
    count_tokens: Callable[[], tuple[int, int]] | None = None  # of the prompt, of the output so far
    num_samples: int = 1  # in the queue
    timeout: asyncio.Timeout | None = None  # only of requests that make the engine compute
    end_error: ApiError | None = None  # why the request was ended early, other than by its deadline
    tenant: "Tenant | None" = None  # whose key was sent, where keys have names
    engine_priority: int | None = None  # of its samples, if its tenant's turn has set it

    def __post_init__(self) -> None:
        self.scope.setdefault("state", {})["exchange"] = self

    @classmethod
    def in_scope(cls, scope: Scope) -> "Exchange":
        exchange = scope["state"]["exchange"]
        assert isinstance(exchange, Exchange)
        return exchange

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    async def receive(self) -> Message:
        """Pass a message on, and note when the client leaves."""
        message = await self.direct_receive()
        if message["type"] == "http.disconnect" and not self.is_complete:
            self.was_abandoned = True
        return message

    async def send(self, message: Message) -> None:
        """Send a message, note it, and add the id and the warnings to the headers."""
        if message["type"] == "http.response.body":
            self.num_bytes_sent += len(message.get("body", b"")) if self.scope["method"] != "HEAD" else 0
            self.is_complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self.request_id.encode()))
            if route_path(self.scope).startswith(MESSAGES):
                headers.append((b"request-id", self.request_id.encode()))  # where Anthropic's clients look for it
            if self.warnings:
                text = " | ".join(dict.fromkeys(self.warnings)).encode("ascii", "backslashreplace")
                headers.append((b"x-octavo-warnings", text[:_MAX_WARNINGS_BYTES]))
            message = {**message, "headers": headers}
        await self.direct_send(message)

    def send_body(self, data: bytes) -> Awaitable[None]:
        """Send more of a body, bypassing the middleware: it would add nothing, and cost every token."""
        self.num_bytes_sent += len(data)
        return self.direct_send({"type": "http.response.body", "body": data, "more_body": True})

    def limit_to(self, seconds: float | None) -> None:
        """End the request `seconds` after it arrived, unless another limit is earlier."""
        if seconds is None:
            return
        check_timeout(seconds)
        assert self.timeout is not None
        end_s = asyncio.get_running_loop().time() + seconds - self.elapsed_s
        current_s = self.timeout.when()
        self.timeout.reschedule(end_s if current_s is None else min(end_s, current_s))

    def why_ended(self) -> ApiError:
        """Return the error of a request that is cancelled: that of `end_now`, or its deadline's."""
        if self.end_error is not None:
            return self.end_error
        if self.timeout is None or not self.timeout.expired():
            return ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
        message = f"The request reached its time limit after {self.elapsed_s:.1f} s."
        hint = {"x-should-retry": "false"}  # the same request would time out again
        return ApiError(408, message, kind="timeout_error", code="request_timeout", headers=hint)

    def end_now(self, error: ApiError) -> None:
        """Cancel the request with this error."""
        assert self.timeout is not None
        if not self.timeout.expired():  # else it is ending already
            self.end_error = error
            self.timeout.reschedule(asyncio.get_running_loop().time())


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def check_timeout(seconds: float) -> None:
    """Raise InvalidParameterError unless a request can have this limit."""
    if not 0.0 < seconds < float("inf"):
        raise InvalidParameterError("timeout", seconds, "a finite number of seconds greater than 0")


class ExchangeMiddleware:
    """The outermost layer: finds the route, begins an exchange, and counts and logs it when it ends.

    It echoes the client's `X-Request-Id` if that is valid; otherwise it generates one. An exception that no inner layer
    has turned into a response becomes a 500.
    """

    def __init__(self, app: ASGIApp, args: ServerArgs, metrics: HttpMetrics) -> None:
        self._app, self._args, self._metrics = app, args, metrics
        self._known_warnings: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._args.root_path
        scope.update(root_path=root, path=root + route_of(scope["path"], root))  # the form that ASGI prescribes
        sent = (value for name, value in scope["headers"] if name == b"x-request-id" and _REQUEST_ID.fullmatch(value))
        request_id = next(sent, f"req-{uuid.uuid4().hex}".encode()).decode()
        exchange = Exchange(scope, receive, send, request_id)
        self._metrics.num_in_flight += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if exchange.status is not None and not exchange.is_complete:
                raise  # part of the response is sent: uvicorn logs this and closes the connection
            if exchange.status is None:
                await send_error(exchange.send, as_api_error(error), route_path(scope))
            # else: starlette has sent a 500 and re-raises for outer layers to see
        finally:
            self._conclude(exchange)

    def _conclude(self, exchange: Exchange) -> None:
        status, scope = exchange.status or CLIENT_LEFT, exchange.scope
        self._metrics.num_in_flight -= 1
        self._metrics.responses[status] += 1
        route = getattr(scope.get("route"), "path", "none")  # what no route answers has any path
        self._metrics.requests[scope["method"], route, f"{status // 100}xx"] += 1
        self._metrics.num_bytes_sent += exchange.num_bytes_sent
        self._metrics.num_client_aborts += exchange.was_abandoned
        for text in exchange.warnings:  # what is new, whatever its numbers: a client repeats its mistakes
            kind = _NUMBER.sub("0", text)
            if kind not in self._known_warnings and len(self._known_warnings) < _MAX_REMEMBERED:
                self._known_warnings.add(kind)
                logger.warning("%s (request %s; logged once)", text, exchange.request_id)
        if self._args.access_log:
            log_access(exchange, status)


def log_access(exchange: Exchange, status: int) -> None:
    """Log one line; the JSON format gets the same facts as fields."""
    scope, tokens = exchange.scope, exchange.count_tokens() if exchange.count_tokens is not None else None
    client = scope.get("client")
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
        "trace_id": scope["state"].get("trace_id"),
    }
    known = {name: fact for name, fact in facts.items() if fact is not None}
    rest = " ".join(f"{name}={known[name]}" for name in list(known)[4:])
    line = (known["client"], known["method"], repr(known["path"])[1:-1], status, rest)
    level = logging.DEBUG if route_path(scope) in OPEN_PATHS else logging.INFO  # probes are frequent
    access_logger.log(level, "%s %s %s %s %s", *line, extra={"facts": known})


def route_of(path: str, root_path: str) -> str:
    """Return the path as routes spell it: /llm//v1/models/ is /v1/models under the prefix /llm.

    A proxy may strip the server's prefix or keep it; clients repeat slashes, end with one, or leave `/v1` out.
    """
    path = "/" + path.lstrip("/")
    if root_path and (path + "/").startswith(root_path + "/"):  # whole segments: /llmx is not below /llm
        path = path[len(root_path) :]
    head, models, name = path.partition(_MODELS)
    head = _SLASHES.sub("/", "/" + head + models)
    route = head + name if name.strip("/") else "/" + head.strip("/")
    return "/v1" + route if route[1:].partition("/")[0] in _VERSIONED else route


def route_path(scope: Scope) -> str:
    """Return the path as routes see it, without the prefix that `ExchangeMiddleware` has put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send an error as the API of its route does."""
    await send_json(send, msgspec.Raw(error_body(error, path)), error.status, error.headers)


async def send_json(send: Send, body: object, status: int, headers: Mapping[str, str]) -> None:
    """Send a JSON response where no `Response` object can be used."""
    data = msgspec.json.encode(body)
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
