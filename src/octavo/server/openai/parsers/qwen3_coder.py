"""Calls of Qwen3-Coder: tags instead of JSON, so that code in an argument needs no escapes.

    <tool_call><function=f><parameter=a>text</parameter></function></tool_call>

One line break at either end of a value belongs to the tags. Values have no type: those declared as strings by the
tool's schema are taken verbatim (and streamed). A text such as `123` may be a number or a string, `None` a null or a
name: `json_value` takes the reading that the schema allows, through references and unions; if it allows several, JSON
before Python's spelling before plain text.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from octavo.server.openai.parsers.base import Emit, MalformedError, Steps
from octavo.server.openai.parsers.pythonic import literal_value
from octavo.server.openai.parsers.tool_calls import (
    Parameter,
    Schemas,
    ToolCallParser,
    json_rule,
    lark_tag,
    parameters_of,
    quoted,
)
from octavo.structured.disjoint import ALL_TYPES, TYPE_NAMES, resolved, types_of, values_of
from octavo.structured_output import StructuralTag

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_UNIONS = ("anyOf", "oneOf")
_MAX_DEPTH = 32  # of references and unions within one another
_BOOLEANS = {"true": True, "false": False}

Schema = Mapping[str, object]


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
        return cls._tag(name, "\n".join(rules))

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write parameters in an order of their own."""
        rules = "start: body\nbody[lazy]: /(.|\\n)*/ " + quoted(_FUNCTION_END)
        return [cls._tag(name, rules) for name in schemas]

    @staticmethod
    def _tag(name: str, rules: str) -> StructuralTag:
        return lark_tag(f"{BEGIN}\n{_FUNCTION}{name}>\n", rules, f"\n{END}", trigger=BEGIN)

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
        found = list(_declarations(root, root, key, 0))  # several where unions or references declare it
        schema = {"anyOf": found} if len(found) > 1 else next(iter(found), None)
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


def json_value(text: str, schema: Schema, root: Schema) -> str:
    """Return `text` as valid JSON: the first reading that fits `schema`, whose references are those of `root`."""
    readings = list(_readings(text))
    types, listed = _types(schema, root, 0), list(_listed(schema, root, 0))
    for value, written in readings:
        if any(type(value) is type(each) and value == each for each in listed):
            return written
    return next((written for value, written in readings if _type_names(value) & types), readings[0][1])


def _readings(text: str) -> Iterator[tuple[object, str]]:
    """Yield what the text may mean, each with its JSON, the likeliest first; the text itself is always among them."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, strict=False, parse_constant=_refuse)
        yield value, stripped if _is_strict(stripped) else _dumped(value)
    except (ValueError, RecursionError):
        # Of Python's literals a constant, list or dictionary; others, such as `1_000`, are rather text.
        if stripped in ("True", "False", "None") or stripped.startswith(("[", "{")):
            with contextlib.suppress(MalformedError, ValueError, RecursionError):
                value = literal_value(stripped)
                yield value, _dumped(value)
    yield text, _dumped(text)
    if stripped.lower() in _BOOLEANS:
        yield _BOOLEANS[stripped.lower()], stripped.lower()


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_strict(text: str) -> bool:
    """Whether valid JSON has no raw control characters in its strings: everything is below a space between values."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and the infinities are no JSON


def _type_names(value: Any) -> frozenset[str]:
    name = TYPE_NAMES[type(value)]
    is_whole = name == "integer" or (name == "number" and value.is_integer())
    return frozenset({"integer", "number"} if is_whole else {name})


def _types(schema: object, root: Schema, depth: int) -> frozenset[str]:
    """Return the types that a schema allows; all if it says nothing."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset() if schema is False else ALL_TYPES
    types = types_of(schema) or ALL_TYPES
    if values := values_of(schema):
        types &= frozenset().union(*map(_type_names, values))
    for name in _UNIONS:
        if branches := _branches(schema, name):
            types &= frozenset().union(*(_types(branch, root, depth + 1) for branch in branches))
    for branch in (*_branches(schema, "allOf"), *_referred(schema, root)):
        types &= _types(branch, root, depth + 1)
    return types | {"null"} if schema.get("nullable") is True else types


def _listed(schema: object, root: Schema, depth: int) -> Iterator[object]:
    """Yield the values that a schema or a part of it lists."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield from values_of(schema) or ()
    for branch in _parts(schema, root):
        yield from _listed(branch, root, depth + 1)


def _declarations(schema: object, root: Schema, name: str, depth: int) -> Iterator[Schema]:
    """Yield the schemas of one argument."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and isinstance(found := properties.get(name), Mapping):
        yield found
        return
    for branch in _parts(schema, root):
        yield from _declarations(branch, root, name, depth + 1)


def _parts(schema: Mapping[str, Any], root: Schema) -> list[object]:
    """Return the schemas that describe the same value."""
    unions = [branch for name in (*_UNIONS, "allOf") for branch in _branches(schema, name)]
    return [*unions, *_referred(schema, root)]


def _branches(schema: Mapping[str, Any], name: str) -> list[object]:
    branches = schema.get(name)
    return branches if isinstance(branches, list) else []


def _referred(schema: Mapping[str, Any], root: Schema) -> list[object]:
    """Return what a local reference, `#/$defs/name`, points to; nothing for any other."""
    reference = {"$ref": schema.get("$ref")}
    target = resolved(reference, root, 1)
    return [] if target is reference else [target]
