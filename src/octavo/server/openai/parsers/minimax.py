"""Calls of MiniMax M2: several in one section, with tags for parameters, whose values have no quotes.

<minimax:tool_call>
<invoke name="f">
<parameter name="a">text</parameter>
</invoke>
</minimax:tool_call>
"""

import json
import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, parameters_of, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, is_tellable, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME = re.compile(r'[^<>"\n]*')


class MiniMaxParser(TypedArgumentsParser):
    """Parses text with such sections."""

    markers = (BEGIN, END)
    separator = "\n"

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Strings have no quotes, so patterns and lengths cannot be enforced."""
        parameters = parameters_of(schema)
        if parameters is None or not all(_NAME.fullmatch(each.name) and is_tellable(each) for each in parameters):
            return None
        rules = [f"p{index}: {_rule(parameter)}" for index, parameter in enumerate(parameters)]
        uses = [f"p{index}{'' if parameter.is_required else '?'}" for index, parameter in enumerate(parameters)]
        text = "text[lazy]: /(.|\\n)*/ " + quoted(f"{_PARAMETER_END}\n")
        start = f"start: {' '.join(uses)} {quoted(_INVOKE_END)}"
        return cls._tag(name, "\n".join([start, *rules, text]))

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write parameters in an order of their own, and several calls in one section."""
        names = " | ".join(quoted(f'{_INVOKE}{name}">') for name in schemas)
        rules = [
            'start: "\\n" call+ ' + quoted(END),
            f"call: ({names}) body",
            "body[lazy]: /(.|\\n)*/ " + quoted(f"{_INVOKE_END}\n"),
        ]
        return [lark_tag(BEGIN, "\n".join(rules), trigger=BEGIN)]

    @classmethod
    def _tag(cls, name: str, rules: str) -> StructuralTag:
        return lark_tag(f'{BEGIN}\n{_INVOKE}{name}">\n', rules, f"\n{END}", trigger=BEGIN)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_section, BEGIN)

    def _read_section(self) -> Steps[None]:
        yield from self._expect_next(BEGIN)
        yield from self._read_calls_until(END, self._read_call)

    def _read_call(self) -> Steps[None]:
        name = yield from self._read_tag(_INVOKE)
        if name not in self._schemas:
            raise MalformedError("name")
        self._start(name)
        self._arguments("{")
        separator = ""
        while (yield from self._attempt(self._read_parameter(name, separator))):
            separator = ", "
            if not self._has_ended:
                if self._is_cut:
                    self._drop_cut_markup()
                return
        if (yield from self._peek()) or not self._is_cut:
            self._arguments("}")
        yield from self._attempt(self._expect_next(_INVOKE_END))

    def _read_parameter(self, function: str, separator: str) -> Steps[None]:
        key = yield from self._read_tag(_PARAMETER)
        self._marked = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._read_value(function, key, (_PARAMETER_END, _INVOKE_END))
        yield from self._takes(_PARAMETER_END)

    def _read_tag(self, opening: str) -> Steps[str]:
        yield from self._expect_next(opening)
        name = (yield from self._read_while(_NAME)).strip()
        yield from self._expect('">')
        if not name or not name.isprintable():
            raise MalformedError(opening)
        return name


def _rule(parameter: Parameter) -> str:
    """Return the expression of one parameter with its tags."""
    begin, end = quoted(f'{_PARAMETER}{parameter.name}">'), f"{_PARAMETER_END}\n"
    return f"{begin} {value_rule(parameter, 'text', end)}"
