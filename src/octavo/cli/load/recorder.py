"""What one request of a measured run was like, noted down while its answer comes in."""

import time
from collections.abc import Sequence
from itertools import pairwise

from octavo.cli.remote.sse import EventReader
from octavo.cli.remote.wire import DONE, Usage, read_chunk
from octavo.errors import RequestError


class RequestRecord:
    """Times of one request on the clock of `time.perf_counter`, as its reader saw them.

    An arrival is a piece of the stream that brought output. It may carry several tokens: a server under load joins
    what its reader has not fetched yet.
    """

    def __init__(self, planned_s: float, output_len: int) -> None:
        self.planned_s = planned_s  # when it should have been sent
        self.output_len = output_len  # what was asked for
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.arrivals_s: list[float] = []
        self.usage: Usage | None = None
        self.error: str | None = None
        self._reader = EventReader()

    def on_body(self, piece: bytes) -> None:
        """Note when output came. The clock is read first: decoding is not the server's time."""
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
        """Close the record; a success must have brought output and said how many tokens it was."""
        self.ended_s = time.perf_counter()
        self.error = self.error or error
        if self.error is None and self.usage is None:
            self.error = "the stream ended without a usage chunk"
        if self.error is None and not self.arrivals_s:
            self.error = "the stream brought no text"

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
        """Between an arrival and the next."""
        return [(b - a) * 1e3 for a, b in pairwise(self.arrivals_s)]

    @property
    def per_token_ms(self) -> float | None:
        """Mean time of a token after the first; None where there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) * 1e3 / (self.num_output_tokens - 1)
