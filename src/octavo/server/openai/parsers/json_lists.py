"""Formats whose calls are one JSON list behind a marker: Granite 3, Phi-4, Hunyuan A13B, Command R7B and A."""

import json
from collections.abc import Mapping
from typing import ClassVar

from octavo.server.openai.parsers.base import Steps
from octavo.server.openai.parsers.json_calls import JsonCallParser
from octavo.server.openai.parsers.tool_calls import Schemas, json_rule, json_tag, lark_tag, quoted
from octavo.structured_output import StructuralTag


class ListParser(JsonCallParser):
    """The base of these formats; the end marker is optional, as models forget it."""

    BEGIN: ClassVar[str]
    END: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "arguments"

    @classmethod
    def _opening(cls, name: str) -> str:
        return f'{{"{cls.name_keys[0]}": {json.dumps(name)}, "{cls.arguments_key}": '

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{cls.BEGIN}[{cls._opening(name)}", schema, f"}}]{cls.END}", trigger=cls.BEGIN)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write several calls in one list."""
        calls = [f"{quoted(cls._opening(name))} {json_rule(schema)}" for name, schema in schemas.items()]
        rules = f'start: /\\s*/ "[" /\\s*/ call (/,\\s*/ call)* /\\s*/ "]"\ncall: ({" | ".join(calls)}) "}}"'
        return [lark_tag(cls.BEGIN, rules, cls.END)]

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_marked, self.BEGIN)

    def _read_marked(self) -> Steps[None]:
        yield from self._expect_next(self.BEGIN)
        yield from self._read_calls()
        if self.END:
            yield from self._attempt(self._expect_next(self.END))


class GraniteParser(ListParser):
    """`<|tool_call|>[{"name": "f", "arguments": {...}}]`: Granite 3.0 to 3.3."""

    BEGIN = "<|tool_call|>"
    markers = (BEGIN,)


class Phi4Parser(ListParser):
    """The same with an end marker: Phi-4-mini."""

    BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
    markers = (BEGIN, END)


class HunyuanParser(ListParser):
    """`<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>`: Hunyuan A13B."""

    BEGIN, END = "<tool_calls>", "</tool_calls>"
    markers = (BEGIN, END)


class CohereParser(ListParser):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]<|END_ACTION|>`."""

    BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
    markers = (BEGIN, END)
    name_keys = ("tool_name", "name")
    arguments_key = "parameters"
