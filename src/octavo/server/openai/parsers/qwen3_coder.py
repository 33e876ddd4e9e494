"""Calls of Qwen3-Coder: tags instead of JSON, so that code in an argument needs no escapes.

    <tool_call><function=f><parameter=a>text</parameter></function></tool_call>

One line break at either end of a value belongs to the tags. Values have no type: those declared as strings by the
tool's schema are taken verbatim (and streamed), others are read as one of the types that it
allows (`values.py`).
"""

import json
import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import Emit, MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import (
    Parameter,
    Schemas,
    ToolCallParser,
    json_rule,
    lark_tag,
    parameters_of,
    quoted,
)
from octavo.server.openai.parsers.values import json_value, parameter_schema
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(ToolCallParser):
    """Parses text with calls in tags."""

    markers = (BEGIN, END)
    separator = "\n"
    writes_json = False

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Strings have no quotes, so patterns and lengths cannot be enforced."""
        parameters = parameters_of(schema)
        if parameters is None or not all(_is_tellable(parameter) for parameter in parameters):
            return None
        rules = [f"p{index}: {_rule(parameter)}" for index, parameter in enumerate(parameters)]
        uses = [f"p{index}{'' if parameter.is_required else '?'}" for index, parameter in enumerate(parameters)]
        text = "text[lazy]: /(.|\\n)*/ " + quoted(f"\n{_PARAMETER_END}\n")
        rules = [f"start: {' '.join(uses)} {quoted(_FUNCTION_END)}", *rules, text]
        return lark_tag(f"{BEGIN}\n{_FUNCTION}{name}>\n", "\n".join(rules), f"\n{END}", trigger=BEGIN)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write parameters in an order of their own."""
        rules = "start: body\nbody[lazy]: /(.|\\n)*/ " + quoted(_FUNCTION_END)
        return [lark_tag(f"{BEGIN}\n{_FUNCTION}{name}>\n", rules, f"\n{END}", trigger=BEGIN) for name in schemas]

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_call, BEGIN)

    def _read_call(self) -> Steps[None]:
        yield from self._expect_next(BEGIN)
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
        separator = ""
        while (yield from self._attempt(self._begin_parameter(name, separator))):
            separator = ", "
            if not (yield from self._takes(_PARAMETER_END)):
                if self._is_cut:
                    self._drop_cut_markup()
                return False
        return (yield from self._peek()) != ""

    def _begin_parameter(self, function: str, separator: str) -> Steps[None]:
        key = yield from self._read_tag(_PARAMETER)
        self._marked = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._takes("\n")
        root = self._schemas[function]
        schema = parameter_schema(root, key)
        is_text = schema is None or schema.get("type") == "string"
        if is_text:
            self._arguments('"')
        pieces: list[str] = []
        emit: Emit = self._escaped if is_text else pieces.append
        if (yield from self._copy_until((_PARAMETER_END,), emit)):
            space = self._rest.partition(_PARAMETER_END)[0]
            self._skip(len(space))
            emit(space.removesuffix("\n"))
            self._arguments('"' if schema is None or is_text else json_value("".join(pieces), schema, root))

    def _escaped(self, text: str) -> None:
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_tag(self, opening: str) -> Steps[str]:
        yield from self._expect_next(opening)
        name = (yield from self._read_while(_NAME)).strip()
        yield from self._expect(">")
        if not name or not name.isprintable():
            raise MalformedError(opening)
        return name


def _is_tellable(parameter: Parameter) -> bool:
    has_plain_name = _NAME.fullmatch(parameter.name) is not None and parameter.name.isprintable()
    return has_plain_name and not (parameter.is_string and parameter.strings is None)


def _rule(parameter: Parameter) -> str:
    """Return the expression of one parameter with its tags."""
    begin, end = quoted(f"{_PARAMETER}{parameter.name}>\n"), quoted(f"\n{_PARAMETER_END}\n")
    if not parameter.is_string:
        return f"{begin} {json_rule(parameter.schema)} {end}"
    if not parameter.strings:
        return f"{begin} text"
    return f"{begin} ({' | '.join(map(quoted, parameter.strings))}) {end}"
