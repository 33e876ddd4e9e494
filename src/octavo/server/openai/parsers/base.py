"""What a parser gives: pieces of an answer, each saying what it is a piece of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins. `index` counts the calls of one answer from 0; `id` is new."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of call `index`: the pieces, put together, are JSON text as the model wrote it."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Reads one answer. However its text is cut into pieces, the deltas put together are the same.

    Text is held back only while it may still turn out to be something else; `finish` gives what is left.
    """

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]: ...


class ContentOnly:
    """The parser of models that neither think nor call: all text is content."""

    def push(self, text: str) -> Sequence[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Delta]:
        return []


@dataclass(slots=True)
class ParsedCall:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Put more pieces where they belong."""
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


def parse_all(parser: OutputParser, text: str) -> ParsedMessage:
    """Return what `parser` makes of a whole text."""
    message = ParsedMessage()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message
