"""Admits a bounded number of samples, and none while the server drains.

The engine runs `max_num_seqs` samples at once and queues the rest. The queue is bounded here, where a rejection is
cheap and can tell the client when to retry.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError, unavailable
from octavo.server.middleware.exchange import Exchange
from octavo.server.middleware.replies import OPEN_PATHS, asks_for_work, refuse, route_path, send_json

_RATE_WINDOW = 32  # finished requests that the estimated waiting time is based on
_MAX_RETRY_AFTER_S = 30


class Ticket:
    """A request's place in the queue, held for the length of a `with` block."""

    __slots__ = ("_admission", "end_request", "num_samples")

    def __init__(self, admission: "Admission", end_request: Callable[[ApiError], None]) -> None:
        self._admission = admission
        self.end_request = end_request  # cancels it
        self.num_samples = 1

    def resize(self, num_samples: int) -> None:
        """Set how many samples the request has; until then it counts as one."""
        self.num_samples = num_samples

    def __enter__(self) -> Self:
        self._admission.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)


class Admission:
    """Tracks requests from admission to the end of their response. Owned by one event loop."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running, self._max_waiting = max_running, max_waiting
        self._tickets: set[Ticket] = set()
        self._ends_s: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False

    def __len__(self) -> int:
        """The number of admitted requests."""
        return len(self._tickets)

    @property
    def num_samples(self) -> int:
        """Samples running or waiting."""
        return sum(ticket.num_samples for ticket in self._tickets)

    def admit(self, end_request: Callable[[ApiError], None]) -> Ticket:
        """Admit a request. The last one admitted may exceed the limit with its samples, as a request is not split.

        Raises:
            ApiError: 503 while draining, 429 when the queue is full; with Retry-After.
        """
        if self.is_draining:
            raise draining()
        if self.num_samples >= self._max_running + self._max_waiting:
            message = f"The queue is full: {self._max_waiting} samples are waiting. Please try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(self._retry_after_s())})
        return Ticket(self, end_request)

    def enter(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        self._is_idle.clear()

    def leave(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self._ends_s.append(time.monotonic())
        if not self._tickets:
            self._is_idle.set()

    def start_draining(self) -> None:
        """Reject new requests; admitted ones continue."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when no requests are left."""
        await self._is_idle.wait()

    def end_all(self) -> int:
        """Cancel all admitted requests; return how many."""
        for ticket in self._tickets:
            ticket.end_request(draining())
        return len(self._tickets)

    def _retry_after_s(self) -> int:
        """Estimate when half of the queue will be done, from the rate at which requests finished recently."""
        if len(self._ends_s) < 2:
            return 1
        seconds_per_end = (time.monotonic() - self._ends_s[0]) / len(self._ends_s)
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds_per_end * self._max_waiting / 2)))


def draining() -> ApiError:
    """The error for new requests while the last ones finish, and for those that do not finish in time."""
    return unavailable("The server is shutting down.", "draining")


class AdmissionMiddleware:
    """Gives each generation request a ticket, or rejects it before its body is read. Probes report draining."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: HttpMetrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not asks_for_work(scope):
            if scope["type"] == "http" and self._admission.is_draining and route_path(scope) in OPEN_PATHS:
                error = draining()
                await send_json(send, {"status": "draining", "error": error.detail}, error.status, error.headers)
            else:
                await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        try:
            ticket = self._admission.admit(exchange.end_now)
        except ApiError as error:
            await refuse(send, error, self._metrics)
            return
        with ticket:
            exchange.ticket = ticket
            await self._app(scope, receive, send)
