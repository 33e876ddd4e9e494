"""What a request must pass before its route: API key, a place in the queue, a deadline, a complete body.

The engine runs `max_num_seqs` samples at once and queues the rest. The queue is bounded here, before a body is read,
where a rejection is cheap and can tell the client when to retry.
"""

import asyncio
import codecs
import hashlib
import hmac
import math
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import MESSAGES, RESPONSES, ApiError, as_api_error, unavailable
from octavo.server.http.exchange import (
    COMPUTED,
    OPEN_PATHS,
    STREAMED_PATHS,
    STREAMS,
    Exchange,
    check_timeout,
    route_path,
    send_error,
    send_json,
)
from octavo.server.kept.returning import again
from octavo.server.pages import PUBLIC_PATHS
from octavo.server.tenants.tenant import Tenant
from octavo.server.tenants.tenants import Tenants, owner_of

_RATE_WINDOW = 32  # finished requests that the estimated waiting time is based on
_MAX_RETRY_AFTER_S = 30
WATCHED = "/ui/engine"  # a stream without an end of its own
_FORM = b"application/x-www-form-urlencoded"
_STORED = ("/v1/files", "/v1/batches")


class Admission:
    """A bounded queue of requests, from admission to the end of their response. Owned by one event loop."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running, self._max_waiting = max_running, max_waiting
        self._exchanges: set[Exchange] = set()
        self._lookers: set[Exchange] = set()  # who watch the engine
        self._ends_s: deque[float] = deque(maxlen=_RATE_WINDOW)  # since a request last had to wait for none
        self._request_s: float | None = None  # that one takes which did not wait, as a mean of the last ones
        self.is_idle = asyncio.Event()  # no requests are left
        self.is_idle.set()
        self.is_draining = False  # new requests are rejected; admitted ones continue

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def num_samples(self) -> int:
        return sum(exchange.num_samples for exchange in self._exchanges)

    @contextmanager
    def admit(
        self, exchange: Exchange, *, has_place: bool = False, max_wait_s: float | None = None
    ) -> Generator[None, None, None]:
        """Admit a request. The last one admitted may exceed the limit with its samples, as a request is not split.

        Tenants have a queue each: what one has sent refuses no other's requests.

        One that `has_place` is always admitted: it computes nothing, or the server before has admitted it.

        Raises ApiError: 503 while draining, 429 when the queue is full, or would take more than `max_wait_s`; with
        Retry-After.
        """
        if has_place:
            exchange.num_samples = 0  # until it is known
        elif self.is_draining:
            raise draining()
        elif (num_samples := self._num_samples_of(exchange.tenant)) >= self._max_running + self._max_waiting:
            message = f"The queue is full: {self._max_waiting} samples are waiting. Please try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(self._retry_after_s())})
        elif max_wait_s is not None and (wait_s := self._expected_wait_s(num_samples, exchange.tenant)) > max_wait_s:
            message = f"The expected wait is {wait_s:.1f} s, more than {max_wait_s:g} s. Please try again later."
            after = {"Retry-After": str(min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - max_wait_s))))}
            raise ApiError(429, message, code="wait_too_long", headers=after)
        is_at_once = not has_place and self.num_samples < self._max_running
        if is_at_once:  # the rate of before says nothing about a queue: perhaps nobody came
            self._ends_s.clear()
        self._exchanges.add(exchange)
        self.is_idle.clear()
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._exchanges.remove(exchange)
            now_s = time.monotonic()
            self._ends_s.append(now_s)
            if is_at_once:
                before_s = now_s - start_s if self._request_s is None else self._request_s
                self._request_s = (before_s + now_s - start_s) / 2.0
            if not self._exchanges:
                self.is_idle.set()

    @contextmanager
    def looking(self, exchange: Exchange) -> Generator[None, None, None]:
        """A client watches the engine, until it leaves or the server ends, which does not wait for it."""
        self._lookers.add(exchange)
        try:
            yield
        finally:
            self._lookers.remove(exchange)

    def end_lookers(self) -> None:
        """End the exchanges of those who watch."""
        for exchange in self._lookers:
            exchange.end_now(draining())

    def end_all(self) -> int:
        """Cancel all admitted requests; return how many."""
        for exchange in self._exchanges:
            exchange.end_now(draining())
        return sum(exchange.num_samples > 0 for exchange in self._exchanges)

    def _num_samples_of(self, tenant: Tenant | None) -> int:
        return sum(exchange.num_samples for exchange in self._exchanges if exchange.tenant is tenant)

    def _expected_wait_s(self, num_own: int, tenant: Tenant | None) -> float:
        """Estimate how long one more request waits behind `num_own` samples, from the rate of recent ends.

        Active tenants take turns, so each gets an equal part of the rate.
        """
        active = {exchange.tenant for exchange in self._exchanges} | {tenant}
        num_ahead = num_own - self._max_running // len(active)
        if num_ahead < 0 or self.num_samples < self._max_running:
            return 0.0
        return (num_ahead + 1) * len(active) * (self._seconds_per_end() or 0.0)

    def _retry_after_s(self) -> int:
        """Estimate when half of the queue will be done, from the rate at which requests finished recently."""
        seconds_per_end = self._seconds_per_end()
        if seconds_per_end is None:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds_per_end * self._max_waiting / 2)))

    def _seconds_per_end(self) -> float | None:
        if len(self._ends_s) < 2:
            return None if self._request_s is None else self._request_s / self._max_running
        return (time.monotonic() - self._ends_s[0]) / len(self._ends_s)


class RequestPolicy:
    """Passes on what may go to its route, with its body in the exchange, and refuses the rest.

    A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`; without keys, all requests pass. A deadline is the
    server's or the client's, the earliest: the header `X-Request-Timeout`, or the body's field `timeout`, in seconds
    since the request arrived. It cancels the request's task, which aborts it in the engine: 408 if nothing was sent
    yet; a stream that has started gets an error as its last event. Shutdown ends requests the same way.
    """

    def __init__(
        self,
        app: ASGIApp,
        args: ServerArgs,
        keys: Iterable[str],
        admission: Admission,
        metrics: HttpMetrics,
        tenants: Tenants | None = None,
    ) -> None:
        self._app, self._args, self._admission, self._metrics = app, args, admission, metrics
        self._tenants = tenants
        # Digests have equal lengths, so comparing them does not leak the key's length.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, path = Exchange.in_scope(scope), route_path(scope)
        try:
            known = again(scope)
            if known is not None:
                exchange.owner = known.owner
            elif (self._digests or self._tenants) and path not in OPEN_PATHS and path not in PUBLIC_PATHS:
                exchange.owner = self._check_key(exchange)
            has_place = (
                known is not None
                or is_cancellation(scope)
                or (self._args.resume_s > 0.0 and is_return_to_stream(scope))
            )
            if scope["method"] == "POST" and path.startswith(_STORED):  # later, if at all
                self._check_stored(exchange, path)
                await self._call(exchange, receive, send)
            elif has_place or (scope["method"] == "POST" and path.startswith(COMPUTED)):
                with self._admit(exchange, has_place=has_place), self._metrics.counting_admitted():
                    await self._call_in_time(exchange, receive, send)
            elif self._admission.is_draining and path in OPEN_PATHS:
                await _send_draining(send)
            elif path == WATCHED:
                exchange.num_samples = 0  # it computes nothing
                with self._admission.looking(exchange):
                    await self._call_in_time(exchange, receive, send)
            else:
                await self._call(exchange, receive, send)
        except ApiError as error:
            await self._refuse(exchange, send, error)

    def _check_stored(self, exchange: Exchange, path: str) -> None:
        if self._admission.is_draining:
            raise draining()
        if exchange.tenant is not None:
            exchange.tenant.check_batches(path)

    def _admit(self, exchange: Exchange, *, has_place: bool) -> AbstractContextManager[None]:
        """See `Admission.admit`. Raises ApiError, 429, too, where the key's limits are reached."""
        if exchange.tenant is not None and not has_place:
            exchange.tenant.check_rates()
        return self._admission.admit(exchange, has_place=has_place, max_wait_s=self._max_wait_s(exchange))

    def _max_wait_s(self, exchange: Exchange) -> float | None:
        """Return the longest wait that makes sense for a request; None: it is not limited."""
        if self._args.max_wait_s is None:
            return None
        asked = _deadline_header(exchange)
        limits = (self._args.max_wait_s, self._args.request_timeout_s, asked)
        return min(limit for limit in limits if limit is not None)

    def _check_key(self, exchange: Exchange) -> str:
        """Return whose key the request has: its digest, or its tenant's name as one. Raises ApiError, 401."""
        key = key_of(exchange.scope["headers"])
        if key is None:
            message = "No API key was sent. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
            raise _unauthorized(message, "missing_api_key")
        digest = hashlib.sha256(key).digest()
        if self._tenants is not None and (tenant := self._tenants.find(digest)) is not None:
            exchange.tenant = tenant
            return owner_of(tenant)
        # Compare with every key in constant time, so that timing does not leak them.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise _unauthorized("The API key is not valid.", "invalid_api_key")
        return digest.hex()

    async def _call_in_time(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._args.request_timeout_s) as exchange.timeout:
                exchange.limit_to(_deadline_header(exchange))
                await self._call(exchange, receive, send)
        except TimeoutError:
            if exchange.timeout is None or not exchange.timeout.expired():
                raise
            await self._refuse(exchange, send, exchange.why_ended())

    async def _call(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        is_streamed = route_path(exchange.scope) in STREAMED_PATHS
        if exchange.scope["method"] in ("POST", "PUT", "PATCH") and not is_streamed:
            check_headers(dict(exchange.scope["headers"]), self._args.max_body_bytes, route_path(exchange.scope))
            body = await self._read(receive)
            if body is None:
                return
            exchange.body = body
        is_computed = exchange.timeout is not None and exchange.num_samples > 0
        if self._tenants is None or exchange.tenant is None or not is_computed:
            await self._app(exchange.scope, receive, send)
            return
        self._tenants.check_body(exchange)
        async with self._tenants.turn(exchange) as is_here:
            if is_here:
                await self._app(exchange.scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left before its end. `http_protocol.py` limits its time."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._args.max_body_bytes:
                raise _too_large(self._args.max_body_bytes)
            if not message.get("more_body", False):
                return b"".join(parts).removeprefix(codecs.BOM_UTF8)  # which some clients put before their JSON

    async def _refuse(self, exchange: Exchange, send: Send, error: ApiError) -> None:
        """Respond with an error, and count it under its code."""
        if exchange.is_complete:
            return
        assert error.detail.code is not None
        self._metrics.rejections[error.detail.code] += 1
        if exchange.tenant is not None:
            exchange.tenant.usage.refused += 1
        if exchange.status is None:
            await send_error(send, error, route_path(exchange.scope))
        else:
            last = b"" if exchange.last_words is None else exchange.last_words(error)
            await send({"type": "http.response.body", "body": last})


async def _send_draining(send: Send) -> None:
    error = draining()
    await send_json(send, {"status": "draining", "error": error.detail}, error.status, error.headers)


def draining() -> ApiError:
    """The error for new requests while the last ones finish, and for those that do not finish in time."""
    return unavailable("The server is shutting down.", "draining")


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the API key in a request's headers; None if there is none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None


def is_return_to_stream(scope: Scope) -> bool:
    """Whether a request asks for a stream that has begun; it computes nothing, whether there is one or not."""
    path = route_path(scope)
    has_id = any(name == b"last-event-id" for name, _ in scope["headers"])
    is_resumed = has_id and (path.endswith("/completions") or path in (MESSAGES, RESPONSES))
    return is_resumed or path.startswith(STREAMS)


def is_cancellation(scope: Scope) -> bool:
    """Whether a request ends a response in the background; it computes nothing."""
    path = route_path(scope)
    return path.startswith(f"{RESPONSES}/") and path.endswith("/cancel")


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _deadline_header(exchange: Exchange) -> float | None:
    """Return the seconds of the header X-Request-Timeout. Raises ApiError, 400."""
    value = next((value for name, value in exchange.scope["headers"] if name == b"x-request-timeout"), None)
    if value is None:
        return None
    try:
        seconds = float(value)
        check_timeout(seconds)
    except (ValueError, InvalidParameterError):
        shown = value[:50].decode("latin-1")
        limit = "must be a finite number of seconds greater than 0"
        raise as_api_error(InvalidParameterError("X-Request-Timeout", shown, limit)) from None
    return seconds


def check_headers(headers: dict[bytes, bytes], max_bytes: int, path: str) -> None:
    """Check the headers that describe the body. Raises ApiError, 413 or 415."""
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() or b"application/json"
    if kind == _FORM and path.startswith("/api/") and b"origin" not in headers:
        kind = b"application/json"  # `curl -d`, as Ollama's users write it; a page of another site has an origin
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        message = f"Content-Type must be application/json, not {kind.decode('latin-1')!r}."
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        message = f"Content-Encoding {encoding.decode('latin-1')!r} is not supported: send the body uncompressed."
        raise ApiError(415, message, code="unsupported_encoding")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")
