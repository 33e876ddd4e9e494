"""Calls of GLM 4.5 and later: `<tool_call>f<arg_key>a</arg_key><arg_value>text</arg_value></tool_call>`.

Strings have no quotes, other values are JSON. Older models write a line break after the name and each tag.
"""

import re
from functools import partial

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.\-]*")
_BREAK = '"\\n"?'


class GlmParser(TypedArgumentsParser):
    """Parses text with such calls."""

    markers = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    call_lead, call_end, text_end = f"{_BREAK} ", END, _VALUE_END
    name_text = re.compile(r"[^<>\n]*")

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write arguments in an order of their own."""
        rules = [
            f"start: {_BREAK} ({quoted(_KEY)} body | {quoted(END)})",
            "body[lazy]: /(.|\\n)*/ " + quoted(END),
        ]
        return [cls._tag(name, "\n".join(rules)) for name in schemas]

    @classmethod
    def _tag(cls, name: str, rules: str) -> StructuralTag:
        return lark_tag(f"{BEGIN}{name}", rules, trigger=BEGIN, tokens=cls.markers)

    @classmethod
    def _rule(cls, parameter: Parameter) -> str:
        key = f"{quoted(_KEY)} {quoted(parameter.name)} {quoted(_KEY_END)}"
        return f"{key} {_BREAK} {quoted(_VALUE)} {value_rule(parameter, 'text', _VALUE_END)} {_BREAK}"

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_call, BEGIN)

    def _read_call(self) -> Steps[None]:
        yield from self._expect_next(BEGIN)
        yield from self._skip_space()
        name = yield from self._read_while(_NAME)
        yield from self._skip_space()
        if name not in self._schemas or not (yield from self._ends_name()):
            raise MalformedError("name")
        self._start(name)
        if not (yield from self._read_arguments(partial(self._read_argument, name))):
            return
        if not self._is_cut or (yield from self._peek()):
            self._arguments("}")
        yield from self._attempt(self._expect_next(END))

    def _ends_name(self) -> Steps[bool]:
        """Return whether what comes next, unread, can follow the name of a call."""
        while not self._rest.startswith((_KEY, END)):
            if not any(tag.startswith(self._rest) for tag in (_KEY, END)):
                return False
            if self._has_run_out():
                return not (self._rest or self._is_cut)
            yield
        return True

    def _read_argument(self, function: str, separator: str) -> Steps[None]:
        yield from self._expect_next(_KEY)
        key = (yield from self._read_while(self.name_text)).strip()
        yield from self._expect(_KEY_END)
        yield from self._expect_next(_VALUE)
        self._begin_argument(separator, key)
        yield from self._read_value(function, key, (_VALUE_END,))
        yield from self._takes(_VALUE_END)
