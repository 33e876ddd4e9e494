"""Deltas, the typed pieces of an answer, and `StreamParser`, which parses streaming text as if all of it had arrived.

Pure: no engine, no wire format.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from octavo.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # yields to wait for text, returns what it read
Emit: TypeAlias = Callable[[str], object]


class Content(msgspec.Struct, frozen=True):
    """More text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of the model's reasoning before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call starts. `index` counts the calls of one answer from 0; `id` is new."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of call `index`: joined, the pieces are JSON text as the model wrote it."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser:
    """Parses one answer, whose text is all content here. The joined deltas do not depend on how the text is split.

    Text is held back only while it may still become something else; `finish` returns what is left. With `is_cut` the
    model was stopped by the length limit: the beginning of markup is then no text.
    """

    def push(self, text: str) -> Sequence[Delta]:
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return []

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text are held back."""
        return 0


class ReasoningCounter(Protocol):
    """Counts the tokens of an answer's reasoning; a part of the parser that reads the answer."""

    def count_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Look at the tokens of text that was read."""

    @property
    def num_tokens(self) -> int:
        """Reasoning tokens so far; 0 for an answer without reasoning."""


class MalformedError(Exception):
    """The text does not follow the format; internal to the parsers."""


class StreamParser(OutputParser, ABC):
    """A format as a generator, written top-down like a parser of complete texts.

    If `_read` needs a character that has not arrived yet, it yields, and resumes with the next piece. It never sees
    where the text was split, so that cannot affect the result. There is one position to rewind to.
    """

    def __init__(self) -> None:
        self._text = ""  # what has arrived, and may still be needed
        self._position = 0  # the first unread character
        self._marked: int | None = None  # at most `_position`
        self._is_closed = False  # no more text will come
        self._is_cut = False  # by the length limit
        self._wanted_more = False  # since the mark, the end of the text came where more was needed
        self._deltas: list[Delta] = []
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole text, to its end; append to `_deltas`."""

    def push(self, text: str) -> Sequence[Delta]:
        first_kept = self._position if self._marked is None else self._marked
        self._text = self._text[first_kept:] + text
        self._position -= first_kept
        self._marked = None if self._marked is None else 0
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        self._is_closed, self._is_cut = True, is_cut
        return self._advance()

    @property
    def num_held(self) -> int:
        return len(self._text) - (self._position if self._marked is None else self._marked)

    def _advance(self) -> Sequence[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))

    @property
    def _rest(self) -> str:
        return self._text[self._position :]

    @property
    def _broke_off(self) -> bool:
        """Whether the length limit has cut the text within what was being read since the mark."""
        return self._is_cut and self._wanted_more

    def _has_run_out(self) -> bool:
        """Return whether there is no more text, asked by what needs more."""
        self._wanted_more = self._is_closed
        return self._is_closed

    def _skip(self, num_characters: int) -> None:
        self._position += num_characters

    def _mark(self) -> None:
        self._marked, self._wanted_more = self._position, False

    def _rewind(self) -> None:
        assert self._marked is not None
        self._position, self._marked = self._marked, None

    def _drop_cut_markup(self) -> None:
        """Read all text: the length limit has cut what was being read."""
        self._position, self._marked = len(self._text), None

    def _peek(self) -> Steps[str]:
        """Return the next character, unread; empty at the end."""
        while self._position == len(self._text):
            if self._has_run_out():
                return ""
            yield
        return self._text[self._position]

    def _skip_space(self) -> Steps[None]:
        while True:
            rest = self._rest
            rest_size = len(rest.lstrip())
            self._skip(len(rest) - rest_size)
            if rest_size or self._is_closed:
                return
            yield

    def _takes(self, marker: str) -> Steps[bool]:
        """Read `marker` if it comes next, otherwise nothing. Waits only while it still may."""
        while not self._text.startswith(marker, self._position):
            if not marker.startswith(self._rest) or self._has_run_out():
                return False
            yield
        self._skip(len(marker))
        return True

    def _expect(self, marker: str) -> Steps[None]:
        """Read `marker`. Raises MalformedError when something else comes."""
        if not (yield from self._takes(marker)):
            raise MalformedError(marker)

    def _expect_next(self, marker: str) -> Steps[None]:
        """Read `marker` and any white space before it. Raises as `_expect`."""
        yield from self._skip_space()
        yield from self._expect(marker)

    def _copy_until(self, markers: Sequence[str], emit: Emit) -> Steps[bool]:
        """Emit text up to the first of `markers` and the white space before it, which stay unread.

        Returns False if the text ends without one; only trailing white space and part of a marker are then unread.
        """
        while True:
            text = self._rest
            end = min((place for marker in markers if (place := text.find(marker)) >= 0), default=len(text))
            found = end < len(text)
            shown = text[: end if found else len(text) - open_tail(text, markers)].rstrip()
            self._skip(len(shown))
            emit(shown)
            if found or self._is_closed:
                return found
            yield

    def _copy_rest(self, emit: Emit) -> Steps[None]:
        while True:
            text = self._rest
            self._skip(len(text))
            emit(text)
            if self._is_closed:
                return
            yield

    def _read_while(self, characters: re.Pattern[str]) -> Steps[str]:
        """Return the longest match of `characters`, a pattern for any number of them, from here on."""
        pieces: list[str] = []
        while (yield from self._peek()):
            found = characters.match(self._rest)
            if found is None or not found[0]:
                break
            self._skip(len(found[0]))
            pieces.append(found[0])
        return "".join(pieces)


def open_tail(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker."""
    return max((_open_tail(text, marker) for marker in markers), default=0)


def _open_tail(text: str, marker: str) -> int:
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place = text.find(marker[0], place + 1)
    return 0
