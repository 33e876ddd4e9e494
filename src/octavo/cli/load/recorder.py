"""Records one request of a benchmark while its response is streamed."""

import time
from collections.abc import Sequence
from itertools import pairwise

from octavo.cli.remote.sse import EventReader
from octavo.cli.remote.wire import DONE, Usage, read_chunk
from octavo.errors import RequestError


class RequestRecord:
    """Timestamps of one request (`time.perf_counter`), as seen by the client.

    An arrival is a chunk of the stream with output. It may contain several tokens: a server under load merges what the
    client has not read yet.
    """

    def __init__(self, planned_s: float, output_len: int) -> None:
        self.planned_s = planned_s  # when it was scheduled to be sent
        self.output_len = output_len  # requested number of tokens
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.arrivals_s: list[float] = []
        self.usage: Usage | None = None
        self.error: str | None = None
        self._reader = EventReader()

    def on_body(self, piece: bytes) -> None:
        """Record an arrival. The clock is read first, so that parsing is not attributed to the server."""
        now_s = time.perf_counter()
        try:
            has_output = [self._read(data) for data in self._reader.feed(piece) if data != DONE]
        except RequestError as error:
            self.error = self.error or str(error)
            return
        if any(has_output):
            self.arrivals_s.append(now_s)

    def _read(self, data: bytes) -> bool:
        chunk = read_chunk(data)
        if chunk.usage is not None:
            self.usage = chunk.usage
        return any(choice.has_output for choice in chunk.choices)

    def end(self, error: str | None = None) -> None:
        """Finish the record; a success must have output and report its number of tokens."""
        self.ended_s = time.perf_counter()
        self.error = self.error or error
        if self.error is None and self.usage is None:
            self.error = "the stream ended without a usage chunk"
        if self.error is None and not self.arrivals_s:
            self.error = "the stream contained no text"

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.completion_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.prompt_tokens

    @property
    def first_token_ms(self) -> float:
        return (self.arrivals_s[0] - self.sent_s) * 1e3

    @property
    def end_to_end_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1e3

    @property
    def gaps_ms(self) -> Sequence[float]:
        """Times between consecutive arrivals."""
        return [(b - a) * 1e3 for a, b in pairwise(self.arrivals_s)]

    @property
    def per_token_ms(self) -> float | None:
        """Mean time per token after the first; None if there is no second token."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) * 1e3 / (self.num_output_tokens - 1)
