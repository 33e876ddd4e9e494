"""Metrics of the HTTP side: responses, rejections, disconnects."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HttpMetrics:
    """Totals since the start. Updated only by the middleware, in the event loop."""

    num_in_flight: int = 0  # requests without a complete response
    responses: Counter[int] = field(default_factory=Counter)  # by status; 499: the client disconnected first
    requests: Counter[tuple[str, str, str]] = field(
        default_factory=Counter
    )  # by method, route, class: ("GET", "/", "2xx")
    rejections: Counter[str] = field(default_factory=Counter)  # by cause: the `code` of the error
    num_client_aborts: int = 0  # clients that disconnected before the end of their response
    num_bytes_sent: int = 0  # bodies only
