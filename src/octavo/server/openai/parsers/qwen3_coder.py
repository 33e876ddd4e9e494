"""Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: tags instead of JSON, so that code in an argument needs no escapes.

    <tool_call><function=f><parameter=a>text</parameter></function></tool_call>

One line break at either end of a value belongs to the tags. Models forget tags: without `<tool_call>` a function of
the request is a call all the same, and a value without its end tag ends before the next declared parameter, or with
the call.
"""

import json
import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, parameters_of, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, is_tellable, names_of, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_CALL_ENDS = (f"{_FUNCTION_END}\n{END}", _FUNCTION_END + END)
_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(TypedArgumentsParser):
    """Parses text with calls in tags."""

    markers = (BEGIN, END, _FUNCTION)
    separator = "\n"

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Strings have no quotes, so patterns and lengths cannot be enforced."""
        parameters = parameters_of(schema)
        if parameters is None or not all(_has_plain_name(each) and is_tellable(each) for each in parameters):
            return None
        rules = [f"p{index}: {_rule(parameter)}" for index, parameter in enumerate(parameters)]
        uses = [f"p{index}{'' if parameter.is_required else '?'}" for index, parameter in enumerate(parameters)]
        text = "text[lazy]: /(.|\\n)*/ " + quoted(f"\n{_PARAMETER_END}\n")
        rules = [f"start: {' '.join(uses)} {quoted(_FUNCTION_END)}", *rules, text]
        return cls._tag(name, "\n".join(rules))

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write parameters in an order of their own."""
        rules = "start: body\nbody[lazy]: /(.|\\n)*/ " + quoted(_FUNCTION_END)
        return [cls._tag(name, rules) for name in schemas]

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        return tuple(f"{BEGIN}\n{_FUNCTION}{name}>" for name in schemas)

    @staticmethod
    def _tag(name: str, rules: str) -> StructuralTag:
        return lark_tag(f"{BEGIN}\n{_FUNCTION}{name}>\n", rules, f"\n{END}", trigger=BEGIN)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_call, BEGIN, _FUNCTION)

    def _read_call(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._takes(BEGIN)
        name = yield from self._read_tag(_FUNCTION)
        if name not in self._schemas:
            raise MalformedError("name")
        self._start(name)
        self._arguments("{")
        if (yield from self._read_parameters(name)):
            self._arguments("}")
        for tag in (_FUNCTION_END, END):
            yield from self._attempt(self._expect_next(tag))

    def _read_parameters(self, name: str) -> Steps[bool]:
        """Read all parameters; False if the text ends within one."""
        separator, unread = "", names_of(self._schemas[name])
        while (yield from self._attempt(self._read_parameter(name, separator, unread))):
            separator = ", "
            if not self._has_ended:
                if self._is_cut:
                    self._drop_cut_markup()
                return False
        return (yield from self._peek()) != ""

    def _read_parameter(self, function: str, separator: str, unread: set[str]) -> Steps[None]:
        key = yield from self._read_tag(_PARAMETER)
        self._marked = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._takes("\n")
        unread.discard(key)
        others = tuple(f"{_PARAMETER}{each}>" for each in sorted(unread))
        yield from self._read_value(function, key, (_PARAMETER_END, *_CALL_ENDS, *others))
        yield from self._takes(_PARAMETER_END)

    def _without_markup(self, space: str) -> str:
        return space.removesuffix("\n")

    def _read_tag(self, opening: str) -> Steps[str]:
        yield from self._expect_next(opening)
        name = (yield from self._read_while(_NAME)).strip()
        yield from self._expect(">")
        if not name or not name.isprintable():
            raise MalformedError(opening)
        return name


def _has_plain_name(parameter: Parameter) -> bool:
    return _NAME.fullmatch(parameter.name) is not None and parameter.name.isprintable()


def _rule(parameter: Parameter) -> str:
    """Return the expression of one parameter with its tags."""
    begin, end = quoted(f"{_PARAMETER}{parameter.name}>\n"), f"\n{_PARAMETER_END}\n"
    return f"{begin} {value_rule(parameter, 'text', end)}"
