"""Ways to run a parser: whole, in pieces, and against what was meant."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from hypothesis import strategies as st

from octavo.server.openai.parsers.base import (
    Content,
    Delta,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from octavo.server.openai.parsers.tool_calls import Schemas, ToolCallParser

SCHEMAS: Schemas = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}},
    "g": {"type": "object"},
    "get_weather": {"type": "object", "properties": {}},
}


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


cut_places = st.lists(st.integers(0, 300), max_size=30)


def make(kind: type[ToolCallParser]) -> ToolCallParser:
    """A parser whose ids are counted."""
    numbers = count()
    return kind(SCHEMAS, lambda: next(numbers).to_bytes(12))


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def parse_all(parser: OutputParser, text: str, *, is_cut: bool = False) -> ParsedMessage:
    """The message that is read from a complete text, or one that the length limit has cut."""
    message = ParsedMessage()
    message.add(parser.push(text))
    message.add(parser.finish(is_cut=is_cut))
    return message


def parse_pieces(parser: OutputParser, pieces: Sequence[str]) -> ParsedMessage:
    message = ParsedMessage()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    return message


def parsed(kind: type[ToolCallParser], text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call; the same whole and character by character."""
    message = parse_all(make(kind), text)
    assert parse_pieces(make(kind), list(text)) == message
    ids = [kind.call_id(number.to_bytes(12)) for number in range(len(message.tool_calls))]
    assert [call.id for call in message.tool_calls] == ids
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]
