# ruff: noqa: RUF001, RUF002  (the models write such bars)
"""Calls of DeepSeek models, in two forms of which both are read.

V3.1 and later: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`
V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, and the arguments in a block of code marked as JSON
"""

import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import Steps
from octavo.server.openai.parsers.sections import SectionParser
from octavo.server.openai.parsers.tool_calls import NO_ARGUMENTS, Schemas, json_rule, json_tag, quoted
from octavo.structured_output import StructuralTag

SEP = "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "```json\n", "\n```"
_TYPE = "function"
_WORD = re.compile(r"[\w.\-]*")


class DeepSeekParser(SectionParser):
    """Writes the newer form."""

    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    markers = (SECTION, SECTION_END, CALL, CALL_END, SEP)

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        begin, end = cls._around(name)
        return json_tag(
            f"{cls.SECTION}{cls.CALL}{begin}", schema, f"{end}{cls.CALL_END}{cls.SECTION_END}", trigger=cls.SECTION
        )

    @classmethod
    def _call_rule(cls, name: str, schemas: Schemas) -> str:
        begin, end = cls._around(name)
        head, tail = begin.split(SEP)
        parts = [
            quoted(head),
            quoted(SEP),
            tail and quoted(tail),
            json_rule(schemas[name] or NO_ARGUMENTS),
            end and quoted(end),
        ]
        return " ".join(filter(None, parts))

    @staticmethod
    def _around(name: str) -> tuple[str, str]:
        """Return what stands before and after the arguments."""
        return f"{name}{SEP}", ""

    def _read_header(self) -> Steps[tuple[str, str | None]]:
        name = yield from self._read_while(_WORD)
        yield from self._expect_next(SEP)
        yield from self._skip_space()
        if name == _TYPE and (yield from self._peek()) not in ("{", ""):
            name = yield from self._read_while(_WORD)
            yield from self._skip_space()
            if not (yield from self._takes("```json")):
                yield from self._takes("```")
        return name, None

    def _read_call_end(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._takes("```")
        yield from self._expect_next(self.CALL_END)


class DeepSeekV3Parser(DeepSeekParser):
    """Writes the form of V3 and R1."""

    @staticmethod
    def _around(name: str) -> tuple[str, str]:
        return f"{_TYPE}{SEP}{name}\n{_FENCE}", _FENCE_END
