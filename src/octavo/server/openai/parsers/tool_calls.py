"""`ToolCallParser`: what the parsers of all tool-calling formats share.

A call is announced as soon as its name is sure and its arguments have begun; from there on its arguments stream. What
turns out not to be a call before that is content, as it was written. A call that breaks off after it was announced
keeps what was said of it.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from octavo.server.openai.parsers.base import Content, Delta, ToolCallArguments, ToolCallStart
from octavo.server.openai.parsers.reader import MalformedError, Steps, TextReader
from octavo.structured_output import StructuralTag

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
Schemas: TypeAlias = Mapping[str, Mapping[str, object]]  # the tools of a request: name -> JSON schema of the arguments


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def json_tag(begin: str, schema: Mapping[str, object], end: str, *, trigger: str) -> StructuralTag:
    """Return the form of a call whose arguments are one JSON object. No parameters are an empty object."""
    return StructuralTag(begin=begin, json_schema=schema or _NO_ARGUMENTS, end=end, trigger=trigger)


class ToolCallParser(ABC):
    """Reads one answer; a subclass is one format, written as the generator `_read`."""

    markers: ClassVar[tuple[str, ...]] = ()  # strings of the format that may be special tokens of the model
    separator: ClassVar[str] = ""  # between two calls
    writes_json: ClassVar[bool] = True  # whether the arguments of a call are one JSON object

    def __init__(self, schemas: Schemas, new_id: Callable[[], str] = new_call_id) -> None:
        self._schemas = schemas
        self._new_id = new_id
        self._num_calls = 0
        self._reader = TextReader()
        self._deltas: list[Delta] = []
        self._steps = self._read()

    def push(self, text: str) -> Sequence[Delta]:
        """Read on; see `OutputParser`."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> Sequence[Delta]:
        """Read the end; see `OutputParser`."""
        self._reader.close()
        return self._advance()

    @classmethod
    @abstractmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Return the form of one call of `name` with arguments that match `schema`; None where a format cannot tell.

        Raises:
            InvalidParameterError: the schema is too large, too deep or no JSON.
        """

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole text, to its end."""

    def _advance(self) -> Sequence[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))

    def _start(self, name: str, call_id: str | None = None) -> None:
        """Announce a call: from here on there is no way back."""
        self._reader.unmark()
        self._deltas.append(ToolCallStart(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def _attempt(self, call: Steps[None]) -> Steps[bool]:
        """Read a call; if it turns out to be none, go back to where it began and return False."""
        self._reader.mark()
        try:
            yield from call
        except MalformedError:
            self._reader.rewind()
            return False
        self._reader.unmark()
        return True

    def _pass_over(self, *markers: str) -> None:
        """Show the marker that opened no call, and the white space before it, as the text that they are."""
        text = self._reader.rest
        end, _ = min((text.index(marker) + len(marker), marker) for marker in markers if marker in text)
        self._content(text[:end])
        self._reader.skip(end)

    def _close_text(self) -> None:
        """Show what the text ends in; white space behind a call belongs to the call."""
        rest = self._reader.rest
        if rest.strip() or not self._num_calls:
            self._content(rest)
        self._reader.skip(len(rest))
