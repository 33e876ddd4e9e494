"""Finds stop strings in the content of an answer, which is what the client reads as its text.

Reasoning, and the markup and arguments of calls, are not searched. The engine's frontend asks after every token, so an
answer ends at the same token whether it is streamed or whole.
"""

from collections.abc import Sequence

from octavo.engine.stop_strings import StopStringMatcher
from octavo.server.openai.parsers.base import Content, Delta, OutputParser


class ContentStops:
    """Watches one answer, with a parser of its own; implements `octavo.engine.stop_finder.StopFinder`.

    It passes on text as the model wrote it, to be parsed again, but keeps back what the parser has not read yet and
    what may still become a stop string. A stop string does not reach across a call.
    """

    def __init__(self, parser: OutputParser, stop: Sequence[str], include_in_output: bool) -> None:
        self._parser = parser
        self._include = include_in_output
        self._matcher = StopStringMatcher(stop, include_in_output=False)
        self._text = ""  # not passed on yet
        self._num_open = 0  # characters at the end of the content so far that may begin a stop string

    def skip(self, delta: str) -> str:
        """Add text that cannot end the answer, as it has too few tokens; return what may be shown."""
        self._text += delta
        self._parser.push(delta)
        return self._release(len(self._text) - self._parser.num_held)

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and the stop string that ends the answer, if any."""
        shown = ""
        for character in delta:  # so that the place of the content in the text is known, however it was cut
            self._text += character
            text, stop = self._search(self._parser.push(character))
            shown += text
            if stop is not None:
                return shown, stop
        return shown, None

    def finish(self, *, is_cut: bool, may_stop: bool) -> tuple[str, str | None]:
        """Return the rest, which may hold a stop string that the parser had not read; the model has ended."""
        shown, stop = self._search(self._parser.finish(is_cut=is_cut)) if may_stop else ("", None)
        return (shown, stop) if stop is not None else (shown + self._release(len(self._text)), None)

    def _search(self, deltas: Sequence[Delta]) -> tuple[str, str | None]:
        for delta in deltas:
            if not isinstance(delta, Content):
                self._matcher.flush()
                self._num_open = 0
                continue
            shown, stop = self._matcher.push(delta.text)
            if stop is not None:
                after = self._num_open + len(delta.text) - len(shown) - len(stop)
                start = self._place_of(stop, len(self._text) - self._parser.num_held - after - len(stop))
                return self._release(start + len(stop) if self._include else start), stop
            self._num_open += len(delta.text) - len(shown)
        num_kept = self._parser.num_held + (0 if self._include else self._num_open)
        return self._release(len(self._text) - num_kept), None

    def _place_of(self, stop: str, expected: int) -> int:
        """Return where the stop string starts; a special token that the parser drops may shift it."""
        start = max(0, expected)
        if self._text.startswith(stop, start):
            return start
        found = self._text.find(stop)
        return start if found < 0 else found

    def _release(self, size: int) -> str:
        shown, self._text = self._text[:size], self._text[size:]
        return shown
