"""Finds stop strings in streamed text, holding back only what might still become one.

The result is a function of the whole text, not of how it is cut into pieces.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Watches one output for any of several stop strings.

    The first complete match wins, and generation stops there. Of several that complete at the same character the
    longest wins, so that none of it remains.
    """

    __slots__ = ("_include", "_last_characters", "_longest_prefix", "_prefixes", "_stop", "_tail")

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include_in_output
        self._prefixes = frozenset(text[:size] for text in stop for size in range(1, len(text)))
        self._last_characters = frozenset(prefix[-1] for prefix in self._prefixes)
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._tail = ""  # the longest suffix of the text that begins a stop string

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add `delta`; return the text that may be shown now, and the stop string that was found, if any.

        The text ends before the stop string, or after it with `include_in_output`. Once found, push no more.
        """
        window = self._tail + delta
        num_shown = len(self._tail) if self._include else 0  # text to be shown anyway is never held back
        found = self._first_match(window)
        if found is None:
            self._tail = self._open_tail(window)
            return window[num_shown : len(window) if self._include else len(window) - len(self._tail)], None
        end, stop = found
        self._tail = ""
        return window[num_shown : end if self._include else end - len(stop)], stop

    def flush(self) -> str:
        """Return the text held back: the output ended without a stop string."""
        held, self._tail = self._tail, ""
        return "" if self._include else held

    def _first_match(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stop:  # longest first, so that a tie goes to the longest
            start = window.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _open_tail(self, window: str) -> str:
        if window[-1:] not in self._last_characters:  # nearly always
            return ""
        for size in range(min(self._longest_prefix, len(window)), 0, -1):
            if window[-size:] in self._prefixes:
                return window[-size:]
        return ""
