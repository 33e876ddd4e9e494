"""Deltas, the typed pieces of an answer, and parsers that wrap or combine others."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


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


class OutputParser(Protocol):
    """Parses one answer. The joined deltas do not depend on how its text is split.

    Text is held back only while it may still become something else; `finish` returns what is left. With `is_cut` the
    model was stopped by the length limit: the beginning of markup is then no text.
    """

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]: ...

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text are held back."""


class ContentOnly:
    """Parses plain answers: all text is content."""

    def push(self, text: str) -> Sequence[Delta]:
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return []

    @property
    def num_held(self) -> int:
        return 0


@dataclass(slots=True)
class ParsedCall:
    """A complete call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A complete answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append deltas."""
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCallStart(_, id_, name):
                    self.tool_calls.append(ParsedCall(id_, name))
                case ToolCallArguments(index, text):
                    self.tool_calls[index].arguments += text


def parse_all(parser: OutputParser, text: str, *, is_cut: bool = False) -> ParsedMessage:
    """Return the message that `parser` reads from a complete text, or one that the length limit has cut."""
    message = ParsedMessage()
    message.add(parser.push(text))
    message.add(parser.finish(is_cut=is_cut))
    return message


class Chain:
    """`second` parses what `first` leaves as content: reasoning first, then tool calls."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> Sequence[Delta]:
        return self._pass_on(self._first.push(text))

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return [*self._pass_on(self._first.finish(is_cut=is_cut)), *self._second.finish(is_cut=is_cut)]

    @property
    def num_held(self) -> int:
        return self._first.num_held + self._second.num_held

    def _pass_on(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                result.extend(self._second.push(delta.text))
            else:
                result.append(delta)
        return result


class CallLimit:
    """Drops calls of `parser` beyond the first `max_calls`."""

    def __init__(self, parser: OutputParser, max_calls: int) -> None:
        self._parser, self._max_calls = parser, max_calls

    def push(self, text: str) -> Sequence[Delta]:
        return self._within(self._parser.push(text))

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return self._within(self._parser.finish(is_cut=is_cut))

    @property
    def num_held(self) -> int:
        return self._parser.num_held

    def _within(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        return [delta for delta in deltas if not self._is_beyond(delta)]

    def _is_beyond(self, delta: Delta) -> bool:
        return isinstance(delta, (ToolCallStart, ToolCallArguments)) and delta.index >= self._max_calls


class SpecialTokenFilter:
    """Drops the special tokens in `hidden`, of which there may be thousands, from text.

    Usually the detokenizer does that. But the markers of calls or reasoning may be special tokens (`[TOOL_CALLS]`,
    `<|python_tag|>`): then the engine emits all special tokens, and this filter, before the parsers, drops those that
    are not markers. Of overlapping matches the first wins, of those with the same start the longest.
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._first_characters = frozenset(token[0] for token in hidden)
        self._prefixes = frozenset(token[:size] for token in hidden for size in range(1, len(token) + 1))
        self._longest = max(map(len, hidden), default=0)
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))) or r"\Z.")
        self._held = ""

    def push(self, text: str) -> Sequence[Delta]:
        if not self._held and self._first_characters.isdisjoint(text):  # nearly always
            return _content(text)
        return self._filtered(self._held + text, is_last=False)

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return self._filtered(self._held, is_last=True)

    @property
    def num_held(self) -> int:
        return len(self._held)

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
