"""Finds stop strings in streamed text, holding back only what might still become one.

The result is a function of the whole text, not of how it is cut into pieces.
"""

from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

_CHARACTER_BITS = 21  # of a code point


class _Automaton:
    """Tracks the longest suffix of a text that begins one of several strings, in constant time per character.

    A state is a prefix of a string, 0 the empty one. Time and memory to build it are linear in the strings' length.
    Source: Aho and Corasick, "Efficient string matching: an aid to bibliographic search", 1975.
    """

    __slots__ = ("_next", "_shorter", "found", "openings", "sizes")

    def __init__(self, strings: Sequence[str]) -> None:
        self.openings = frozenset(text[0] for text in strings)
        self.sizes = [0]  # characters of each state
        self.found: list[str | None] = [None]  # the longest string that each state ends with
        self._next: dict[int, int] = {}  # by state and character
        self._shorter = [0]  # the longest state that each state ends with, itself excluded
        edges: list[tuple[int, str]] = [(0, "")]  # by state: the state that it extends, and by what
        for text in strings:
            state = 0
            for character in text:
                key = state << _CHARACTER_BITS | ord(character)
                if key not in self._next:
                    self._next[key] = len(edges)
                    edges.append((state, character))
                    self.sizes.append(self.sizes[state] + 1)
                    self.found.append(None)
                state = self._next[key]
            self.found[state] = text
        self._shorter *= len(edges)
        for state in sorted(range(1, len(edges)), key=self.sizes.__getitem__):  # shorter states are complete
            before, character = edges[state]
            shorter = self._shorter[state] = self.after(self._shorter[before], character) if before else 0
            self.found[state] = self.found[state] or self.found[shorter]

    def after(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        code = ord(character)
        while True:
            following = self._next.get(state << _CHARACTER_BITS | code)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._shorter[state]


class StopStringMatcher:
    """Watches one output for any of several stop strings.

    The first complete match wins, and generation stops there. Of several that complete at the same character the
    longest wins, so that none of it remains.
    """

    __slots__ = ("_automaton", "_include", "_state", "_tail")

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._automaton = _Automaton(stop)
        self._include = include_in_output
        self._state = 0
        self._tail = ""  # the longest suffix of the text that begins a stop string

    def for_another(self) -> Self:
        """Return a matcher of the same strings for another output, which has not begun."""
        other = copy(self)
        other._state, other._tail = 0, ""
        return other

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add `delta`; return the text that may be shown now, and the stop string that was found, if any.

        The text ends before the stop string, or after it with `include_in_output`. Once found, push no more.
        """
        automaton, state = self._automaton, self._state
        if not state and automaton.openings.isdisjoint(delta):  # nearly always
            return delta, None
        window = self._tail + delta
        num_shown = len(self._tail) if self._include else 0  # text to be shown anyway is never held back
        for end, character in enumerate(delta, start=len(self._tail) + 1):
            state = automaton.after(state, character)
            if (stop := automaton.found[state]) is not None:
                self._state, self._tail = 0, ""
                return window[num_shown : end if self._include else end - len(stop)], stop
        self._state = state
        num_open = automaton.sizes[state]
        self._tail = window[len(window) - num_open :]
        return window[num_shown : len(window) - (0 if self._include else num_open)], None

    def flush(self) -> str:
        """Return the text held back: the output ended without a stop string."""
        held, self._tail, self._state = self._tail, "", 0
        return "" if self._include else held


class StopFinder(Protocol):
    """What a server gives a request if stop strings count in a part of its text only."""

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now, and the stop string that was found, if any."""

    def skip(self, delta: str) -> str:
        """Add text in which no stop string counts, as `min_tokens` is not reached; return what may be shown now."""

    def finish(self, *, is_cut: bool, may_stop: bool) -> tuple[str, str | None]:
        """Return the rest, and the stop string in it, if it may have one; `is_cut` by the length limit."""
