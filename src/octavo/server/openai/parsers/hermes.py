"""Calls of Hermes and Qwen models: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another."""

import json
from collections.abc import Mapping

from octavo.server.openai.parsers.json_call import CallSink, read_json_call
from octavo.server.openai.parsers.reader import Steps, copy_until
from octavo.server.openai.parsers.tool_calls import ToolCallParser, json_tag
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Parses text with calls in tags. A call's end tag is optional."""

    markers = (BEGIN, END)
    separator = "\n"

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        """See `ToolCallParser.tag`."""
        begin = f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '
        return json_tag(begin, schema, f"}}\n{END}", trigger=BEGIN)

    def _read(self) -> Steps[None]:
        while (yield from copy_until(self._reader, (BEGIN,), self._content)):
            if not (yield from self._attempt(self._read_call())):
                self._pass_over(BEGIN)
        self._close_text()

    def _read_call(self) -> Steps[None]:
        reader = self._reader
        yield from reader.expect_next(BEGIN)
        yield from reader.skip_space()
        sink = CallSink(start=self._start, arguments=self._arguments, allows=self._is_offered)
        if not (yield from read_json_call(reader, sink)):
            yield from copy_until(reader, (END,), self._arguments)
        yield from self._attempt(reader.expect_next(END))
