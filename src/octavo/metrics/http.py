"""What the HTTP side counts: answers, refusals, clients that left."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HttpMetrics:
    """Totals since the start. Changed by the middleware alone, in the event loop."""

    num_in_flight: int = 0  # requests that have no complete answer yet
    responses: Counter[int] = field(default_factory=Counter)  # by status; 499: the client left before there was one
    rejections: Counter[str] = field(default_factory=Counter)  # by cause: the `code` of the error
    num_client_aborts: int = 0  # clients that left before the end of their answer
    num_bytes_sent: int = 0  # of bodies
