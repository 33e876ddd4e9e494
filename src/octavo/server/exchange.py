"""One HTTP request and its answer, as operators see them: what the access log and the metrics tell.

The outermost middleware makes it and puts it into `scope["state"]`; those further in add what they know.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.types import Scope, Send

from octavo.errors import InvalidParameterError
from octavo.server.errors import ApiError

if TYPE_CHECKING:
    from octavo.server.admission import Ticket

CLIENT_LEFT = 499  # the status in log and metrics where a client left before there was one

_KEY = "exchange"


class Exchange:
    """Belongs to one request; changed only in the event loop."""

    __slots__ = (
        "_timeout",
        "count_tokens",
        "direct_send",
        "end_error",
        "is_complete",
        "is_event_stream",
        "num_bytes_sent",
        "request_id",
        "started_s",
        "status",
        "ticket",
        "was_abandoned",
    )  # fmt: skip

    def __init__(self, request_id: str, direct_send: Send) -> None:
        self.request_id = request_id
        self.direct_send = direct_send  # the server's own, past all middleware; see `send_body`
        self.started_s = time.monotonic()
        self.status: int | None = None  # None until the answer has begun
        self.is_event_stream = False
        self.is_complete = False
        self.was_abandoned = False  # by the client, before the end of the answer
        self.num_bytes_sent = 0
        self.count_tokens: Callable[[], tuple[int, int]] | None = None  # of the prompt, of the answer so far
        self.ticket: Ticket | None = None
        self.end_error: ApiError | None = None  # why the request was ended early, where not by its deadline
        self._timeout: asyncio.Timeout | None = None

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        """Return the exchange that a scope belongs to."""
        exchange = scope["state"][_KEY]
        assert isinstance(exchange, Exchange)
        return exchange

    def attach(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_KEY] = self

    def send_body(self, data: bytes) -> Awaitable[None]:
        """Send more of a body that has begun. Middleware has nothing to add to it, and a token should cost little."""
        self.num_bytes_sent += len(data)
        return self.direct_send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def start_timeout(self, timeout: asyncio.Timeout) -> None:
        """From now on, `limit_to` brings this one forward."""
        self._timeout = timeout

    def limit_to(self, seconds: float) -> None:
        """Let the request end `seconds` after it came, or earlier where another limit says so.

        Raises:
            InvalidParameterError: not a number greater than 0.
        """
        if not 0.0 < seconds < float("inf"):
            raise InvalidParameterError("timeout", seconds, "a finite number of seconds greater than 0")
        assert self._timeout is not None, "only requests that the deadline middleware has seen"
        end_s = asyncio.get_running_loop().time() + seconds - self.elapsed_s
        current_s = self._timeout.when()
        self._timeout.reschedule(end_s if current_s is None else min(end_s, current_s))

    def end_now(self, error: ApiError) -> None:
        """Break the request off with this error."""
        assert self._timeout is not None, "only requests that the deadline middleware has seen"
        if not self._timeout.expired():  # else it is ending already
            self.end_error = error
            self._timeout.reschedule(asyncio.get_running_loop().time())
