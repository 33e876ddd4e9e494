"""Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: tags instead of JSON, so that code in an argument needs no escapes.

    <tool_call><function=f><parameter=a>text</parameter></function></tool_call>

One line break at either end of a value belongs to the tags. Models forget tags: without `<tool_call>` a function of
the request is a call all the same, and a value without its end tag ends before the next declared parameter, or with
the call.
"""

import re
from functools import partial

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Parameter, Schemas, lark_tag, quoted
from octavo.server.openai.parsers.typed_arguments import TypedArgumentsParser, names_of, value_rule
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_CALL_ENDS = (f"{_FUNCTION_END}\n{END}", _FUNCTION_END + END)


class Qwen3CoderParser(TypedArgumentsParser):
    """Parses text with calls in tags."""

    markers = (BEGIN, END, _FUNCTION)
    call_end, text_end = _FUNCTION_END, f"\n{_PARAMETER_END}\n"
    name_text = re.compile(r"[^<>\n]*")

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write parameters in an order of their own."""
        rules = "start: body\nbody[lazy]: /(.|\\n)*/ " + quoted(_FUNCTION_END)
        return [cls._tag(name, rules) for name in schemas]

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        return tuple(f"{BEGIN}\n{_FUNCTION}{name}>" for name in schemas)

    @classmethod
    def _has_plain_name(cls, parameter: Parameter) -> bool:
        return super()._has_plain_name(parameter) and parameter.name.isprintable()

    @classmethod
    def _rule(cls, parameter: Parameter) -> str:
        begin = quoted(f"{_PARAMETER}{parameter.name}>\n")
        return f"{begin} {value_rule(parameter, 'text', cls.text_end)}"

    @classmethod
    def _tag(cls, name: str, rules: str) -> StructuralTag:
        return lark_tag(f"{BEGIN}\n{_FUNCTION}{name}>\n", rules, f"\n{END}", trigger=BEGIN)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_call, BEGIN, _FUNCTION)

    def _read_call(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._takes(BEGIN)
        name = yield from self._read_named_tag(_FUNCTION, ">")
        if name not in self._schemas:
            raise MalformedError("name")
        self._start(name)
        read = partial(self._read_parameter, name, names_of(self._schemas[name]))
        if (yield from self._read_arguments(read)) and (yield from self._peek()):
            self._arguments("}")
        for tag in (_FUNCTION_END, END):
            yield from self._attempt(self._expect_next(tag))

    def _read_parameter(self, function: str, unread: set[str], separator: str) -> Steps[None]:
        key = yield from self._read_named_tag(_PARAMETER, ">")
        self._begin_argument(separator, key)
        yield from self._takes("\n")
        unread.discard(key)
        others = tuple(f"{_PARAMETER}{each}>" for each in sorted(unread))
        yield from self._read_value(function, key, (_PARAMETER_END, *_CALL_ENDS, *others))
        yield from self._takes(_PARAMETER_END)

    def _without_markup(self, space: str) -> str:
        return space.removesuffix("\n")
