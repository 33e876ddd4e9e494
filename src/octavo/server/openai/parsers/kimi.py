"""Calls of Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`.

What stands before the arguments is also the id of the call, which the chat template writes back into later prompts: so
clients get it unchanged, unless an earlier call of the answer has it.
"""

import re
from collections.abc import Callable, Mapping
from itertools import count

from octavo.server.openai.parsers.base import Steps
from octavo.server.openai.parsers.sections import SectionParser
from octavo.server.openai.parsers.tool_calls import NO_ARGUMENTS, Schemas, json_rule, lark_tag, quoted
from octavo.structured_output import StructuralTag

_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER = re.compile(r"[\w.\-:]*")
_PREFIX = "functions."
_NUMBER = re.compile(r":[0-9]+$")


class KimiParser(SectionParser):
    """Parses text with such calls."""

    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
    markers = (SECTION, SECTION_END, CALL, CALL_END, _ARGUMENTS)

    def __init__(self, schemas: Schemas, draw: Callable[[], bytes] | None = None, max_calls: int | None = None) -> None:
        super().__init__(schemas, draw, max_calls)
        self._ids: set[str] = set()

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        rules = f"start: {cls._numbered(schema)}"
        begin, end = f"{cls.SECTION}{cls.CALL}{_PREFIX}{name}:", f"{cls.CALL_END}{cls.SECTION_END}"
        return lark_tag(begin, rules, end, trigger=cls.SECTION, tokens=cls.markers)

    @classmethod
    def _call_rule(cls, name: str, schemas: Schemas) -> str:
        return f"{quoted(f'{_PREFIX}{name}:')} {cls._numbered(schemas[name])}"

    @staticmethod
    def _numbered(schema: Mapping[str, object]) -> str:
        return f"/[0-9]{{1,3}}/ {quoted(_ARGUMENTS)} {json_rule(schema or NO_ARGUMENTS)}"

    def _read_header(self) -> Steps[tuple[str, str | None]]:
        header = yield from self._read_while(_HEADER)
        yield from self._expect_next(_ARGUMENTS)
        name = _NUMBER.sub("", header)
        if name not in self._schemas:
            name = name.removeprefix(_PREFIX)
        is_id = header.startswith(_PREFIX) and _NUMBER.search(header) and header not in self._ids
        self._ids.add(header)
        return name, header if is_id else self._next_id(name)

    def _next_id(self, name: str) -> str:
        """Return an id as the model should have written it."""
        number = next(number for number in count() if f"{_PREFIX}{name}:{number}" not in self._ids)
        self._ids.add(f"{_PREFIX}{name}:{number}")
        return f"{_PREFIX}{name}:{number}"
