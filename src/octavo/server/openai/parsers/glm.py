"""Calls of GLM 4.5 and later: `<tool_call>f<arg_key>a</arg_key><arg_value>text</arg_value></tool_call>`.

Strings have no quotes, other values are JSON. Older models write a line break after the name and each tag.
"""

import json
import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, parameters_of, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, is_tellable, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.\-]*")
_KEY_TEXT = re.compile(r"[^<>\n]*")
_BREAK = '"\\n"?'


class GlmParser(TypedArgumentsParser):
    """Parses text with such calls."""

    markers = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    separator = "\n"

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Strings have no quotes, so patterns and lengths cannot be enforced."""
        parameters = parameters_of(schema)
        if parameters is None or not all(_KEY_TEXT.fullmatch(each.name) and is_tellable(each) for each in parameters):
            return None
        rules = [f"p{index}: {_rule(parameter)}" for index, parameter in enumerate(parameters)]
        uses = [f"p{index}{'' if parameter.is_required else '?'}" for index, parameter in enumerate(parameters)]
        text = "text[lazy]: /(.|\\n)*/ " + quoted(_VALUE_END)
        start = f"start: {_BREAK} {' '.join(uses)} {quoted(END)}"
        return cls._tag(name, "\n".join([start, *rules, text]))

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
        self._arguments("{")
        separator = ""
        while (yield from self._attempt(self._read_argument(name, separator))):
            separator = ", "
            if not self._has_ended:
                if self._is_cut:
                    self._drop_cut_markup()
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
        key = (yield from self._read_while(_KEY_TEXT)).strip()
        yield from self._expect(_KEY_END)
        yield from self._expect_next(_VALUE)
        self._marked = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._read_value(function, key, (_VALUE_END,))
        yield from self._takes(_VALUE_END)


def _rule(parameter: Parameter) -> str:
    """Return the expression of one argument with its tags."""
    key = f"{quoted(_KEY)} {quoted(parameter.name)} {quoted(_KEY_END)}"
    return f"{key} {_BREAK} {quoted(_VALUE)} {value_rule(parameter, 'text', _VALUE_END)} {_BREAK}"
