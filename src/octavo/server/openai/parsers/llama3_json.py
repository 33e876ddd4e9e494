"""Calls of Llama 3.1 and later: the answer is JSON, `{"name": "f", "parameters": {...}}`, several joined by `;`.

They have no tags, at most `<|python_tag|>` before them, or `<|python_start|>` and `<|python_end|>` in Llama 4. So an
answer is a call only if it begins as one and names a tool of the request: other JSON may be what the user asked for.
"""

import json
from collections.abc import Mapping

from octavo.server.openai.parsers.json_call import CallSink, read_json_call
from octavo.server.openai.parsers.reader import Steps, copy_rest, copy_until
from octavo.server.openai.parsers.tool_calls import ToolCallParser, json_tag
from octavo.structured_output import StructuralTag

TAGS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"


class Llama3JsonParser(ToolCallParser):
    """Parses calls at the beginning of the text or after a tag; what follows the last is text."""

    markers = (*TAGS, END)
    separator = "; "
    marks_names = False

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        """See `ToolCallParser.tag`. Without a tag, only the whole beginning distinguishes a call from other JSON."""
        begin = f'{{"name": {json.dumps(name)}, "parameters": '
        return json_tag(begin, schema, "}", trigger=begin)

    def _read(self) -> Steps[None]:
        is_call = yield from self._attempt(self._read_call())
        if not is_call and (yield from copy_until(self._reader, TAGS, self._content)):
            is_call = yield from self._attempt(self._read_call())
        while is_call:
            is_call = yield from self._attempt(self._read_next_call())
        if self._num_calls:
            yield from self._attempt(self._reader.expect_next(END))
        self._drop_cut_marker()
        yield from copy_until(self._reader, (), self._content)
        self._close_text()

    def _read_next_call(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._reader.takes(";")
        yield from self._read_call()

    def _read_call(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        for tag in TAGS:
            yield from reader.takes(tag)
        yield from reader.skip_space()
        sink = CallSink(start=self._start, arguments=self._arguments, allows=self._is_offered, is_strict=True)
        if not (yield from read_json_call(reader, sink)):
            yield from copy_rest(reader, self._arguments)
