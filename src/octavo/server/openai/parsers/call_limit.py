"""Stops an answer at as many calls as it may have."""

from collections.abc import Sequence

from octavo.server.openai.parsers.base import Delta, OutputParser, ToolCallArguments, ToolCallStart


class CallLimit:
    """Passes on what `parser` gives, without the calls beyond the first `max_calls`."""

    def __init__(self, parser: OutputParser, max_calls: int) -> None:
        self._parser, self._max_calls = parser, max_calls

    def push(self, text: str) -> Sequence[Delta]:
        """Read on; see `OutputParser`."""
        return self._within(self._parser.push(text))

    def finish(self) -> Sequence[Delta]:
        """Read the end; see `OutputParser`."""
        return self._within(self._parser.finish())

    def _within(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        return [delta for delta in deltas if not self._is_beyond(delta)]

    def _is_beyond(self, delta: Delta) -> bool:
        return isinstance(delta, (ToolCallStart, ToolCallArguments)) and delta.index >= self._max_calls
