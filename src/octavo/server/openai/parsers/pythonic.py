"""Calls written as a Python list: `[f(a=1), g(b="x")]`, of Llama 4 and others, perhaps between tags.

Values become JSON, so a call is shown once it is whole. Without a tag, an answer is a call only if it begins as one
and names a tool of the request.
"""

import json
import re
from collections.abc import Iterable

from octavo.server.openai.parsers.python_literals import keyword_arguments, read_parentheses
from octavo.server.openai.parsers.reader import MalformedError, Steps, copy_until, read_while
from octavo.server.openai.parsers.tool_calls import ToolCallParser

TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_NAME = re.compile(r"[\w.\-]*")


class PythonicParser(ToolCallParser):
    """A list of calls at the beginning of the text or behind a tag; what follows it is text."""

    markers = (*TAGS, *TAGS.values())

    def _read(self) -> Steps[None]:
        is_list = yield from self._attempt(self._read_item("["))
        if not is_list and (yield from copy_until(self._reader, tuple(TAGS), self._content)):
            is_list = yield from self._attempt(self._read_item("["))
        while is_list:
            is_list = yield from self._attempt(self._read_item(","))
        if self._num_calls and (yield from self._attempt(self._read_end())):
            yield from self._attempt(self._read_end_tag())
        yield from copy_until(self._reader, (), self._content)
        self._close_text()

    def _read_item(self, before: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        if before == "[":
            yield from self._takes_any(TAGS)
            yield from reader.skip_space()
        yield from reader.expect(before)
        yield from reader.skip_space()
        name = yield from read_while(reader, _NAME)
        if name not in self._schemas or (yield from reader.peek()) != "(":
            raise MalformedError("name")
        arguments = _json_text(keyword_arguments((yield from read_parentheses(reader))))
        self._start(name)
        self._arguments(arguments)

    def _read_end(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._reader.expect("]")

    def _read_end_tag(self) -> Steps[None]:
        yield from self._reader.skip_space()
        if not (yield from self._takes_any(TAGS.values())):
            raise MalformedError("tag")

    def _takes_any(self, tags: Iterable[str]) -> Steps[bool]:
        for tag in tags:
            if (yield from self._reader.takes(tag)):
                return True
        return False


def _json_text(arguments: dict[str, object]) -> str:
    """Return the arguments as JSON, which has no infinities, and as UTF-8, which has no lone surrogates."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:
        raise MalformedError("value") from error
    return text
