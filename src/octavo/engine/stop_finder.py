"""`StopFinder`: what a server gives a request if stop strings count in a part of its text only."""

from typing import Protocol


class StopFinder(Protocol):
    """Finds what ends an output, in place of a search for stop strings in all of its text."""

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now, and the stop string that was found, if any."""

    def skip(self, delta: str) -> str:
        """Add text in which no stop string counts, as `min_tokens` is not reached; return what may be shown now."""

    def finish(self, *, is_cut: bool, may_stop: bool) -> tuple[str, str | None]:
        """Return the rest, and the stop string in it, if it may have one; `is_cut` by the length limit."""
