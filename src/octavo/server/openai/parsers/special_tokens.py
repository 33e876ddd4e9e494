"""Leaves special tokens out of text in which some of them must be seen.

Usually the detokeniser leaves special tokens out. But a model may have made the marks of its calls or thoughts special
tokens (`[TOOL_CALLS]`, `<|python_tag|>`). Then a request asks the engine for all of them, and this filter, which
stands before the parsers, drops those that are no marks.
"""

import re
from collections.abc import Collection, Sequence

from octavo.server.openai.parsers.base import Content, Delta


class SpecialTokenFilter:
    """Passes on text without any of `hidden`, of which there may be thousands. Of two that overlap the first counts,
    of two that begin alike the longer."""

    def __init__(self, hidden: Collection[str]) -> None:
        self._first_characters = frozenset(token[0] for token in hidden)
        self._prefixes = frozenset(token[:size] for token in hidden for size in range(1, len(token) + 1))
        self._longest = max(map(len, hidden), default=0)
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))) or r"\Z.")
        self._held = ""

    def push(self, text: str) -> Sequence[Delta]:
        """Read on; see `OutputParser`."""
        if not self._held and self._first_characters.isdisjoint(text):  # nearly always
            return _content(text)
        return self._filtered(self._held + text, is_last=False)

    def finish(self) -> Sequence[Delta]:
        """Read the end; see `OutputParser`."""
        return self._filtered(self._held, is_last=True)

    def _filtered(self, text: str, is_last: bool) -> Sequence[Delta]:
        num_open = 0 if is_last else self._open_tail(text)
        shown: list[str] = []
        position = 0
        while (found := self._hidden.search(text, position)) and found.start() < len(text) - num_open:
            shown.append(text[position : found.start()])
            position = found.end()
        shown_end = max(position, len(text) - num_open)
        shown.append(text[position:shown_end])
        self._held = text[shown_end:]
        return _content("".join(shown))

    def _open_tail(self, text: str) -> int:
        """Return how much of the end of `text` may become a token, or a longer one."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._prefixes), 0)


def _content(text: str) -> Sequence[Delta]:
    return [Content(text)] if text else []
