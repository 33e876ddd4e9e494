"""Calls of MiniMax M2: several in one section, with tags for parameters, whose values have no quotes.

<minimax:tool_call>
<invoke name="f">
<parameter name="a">text</parameter>
</invoke>
</minimax:tool_call>
"""

import re
from functools import partial

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"


class MiniMaxParser(TypedArgumentsParser):
    """Parses text with such sections."""

    markers = (BEGIN, END)
    call_end, text_end = _INVOKE_END, f"{_PARAMETER_END}\n"
    name_text = re.compile(r'[^<>"\n]*')

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

    @classmethod
    def _rule(cls, parameter: Parameter) -> str:
        begin = quoted(f'{_PARAMETER}{parameter.name}">')
        return f"{begin} {value_rule(parameter, 'text', cls.text_end)}"

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_section, BEGIN)

    def _read_section(self) -> Steps[None]:
        yield from self._expect_next(BEGIN)
        yield from self._read_calls_until(END, self._read_call)

    def _read_call(self) -> Steps[None]:
        name = yield from self._read_named_tag(_INVOKE, '">')
        if name not in self._schemas:
            raise MalformedError("name")
        self._start(name)
        if not (yield from self._read_arguments(partial(self._read_parameter, name))):
            return
        if (yield from self._peek()) or not self._is_cut:
            self._arguments("}")
        yield from self._attempt(self._expect_next(_INVOKE_END))

    def _read_parameter(self, function: str, separator: str) -> Steps[None]:
        key = yield from self._read_named_tag(_PARAMETER, '">')
        self._begin_argument(separator, key)
        yield from self._read_value(function, key, (_PARAMETER_END, _INVOKE_END))
        yield from self._takes(_PARAMETER_END)
