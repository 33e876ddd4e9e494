"""Formats with each argument of a call in tags and without types: what they share.

A text such as `123` may be a number or a string, `None` a null or a name: `json_value` takes the reading that the
tool's schema allows, through references and unions; if it allows several, JSON before Python's spelling before plain
text. Arguments declared as strings are taken verbatim, and streamed.
"""

import contextlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from octavo.server.openai.parsers.base import Emit, MalformedError, Steps
from octavo.server.openai.parsers.pythonic import literal_value
from octavo.server.openai.parsers.tool_calls import (
    Parameter,
    Schemas,
    ToolCallParser,
    json_rule,
    parameters_of,
    quoted,
)
from octavo.structured.disjoint import ALL_TYPES, TYPE_NAMES, resolved, types_of, values_of
from octavo.structured_output import StructuralTag

_UNIONS = ("anyOf", "oneOf")
_MAX_DEPTH = 32  # of references and unions within one another
_BOOLEANS = {"true": True, "false": False}

Schema = Mapping[str, object]


class TypedArgumentsParser(ToolCallParser):
    """The base of these formats.

    Of a grammar, a call begins with `call_lead`, an expression, and ends with `call_end`; a string that may be any text
    ends with `text_end`.
    """

    separator = "\n"
    writes_json = False
    call_lead: ClassVar[str] = ""
    call_end: ClassVar[str]
    text_end: ClassVar[str]
    name_text: ClassVar[re.Pattern[str]]  # of tools and arguments

    def __init__(self, schemas: Schemas, draw: Callable[[], bytes] | None = None, max_calls: int | None = None) -> None:
        super().__init__(schemas, draw, max_calls)
        self._has_ended = True  # the last value, by one of its ends

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Strings have no quotes, so patterns and lengths cannot be enforced."""
        parameters = parameters_of(schema)
        if parameters is None or not all(cls._has_plain_name(each) and is_tellable(each) for each in parameters):
            return None
        rules = [f"p{index}: {cls._rule(parameter)}" for index, parameter in enumerate(parameters)]
        uses = [f"p{index}{'' if parameter.is_required else '?'}" for index, parameter in enumerate(parameters)]
        start = f"start: {cls.call_lead}{' '.join(uses)} {quoted(cls.call_end)}"
        return cls._tag(name, "\n".join([start, *rules, f"text[lazy]: /(.|\\n)*/ {quoted(cls.text_end)}"]))

    @classmethod
    def _has_plain_name(cls, parameter: Parameter) -> bool:
        return cls.name_text.fullmatch(parameter.name) is not None

    @classmethod
    @abstractmethod
    def _tag(cls, name: str, rules: str) -> StructuralTag:
        """Constrain a call of `name`, whose arguments follow `rules`."""

    @classmethod
    @abstractmethod
    def _rule(cls, parameter: Parameter) -> str:
        """Return the expression of one argument with its tags."""

    def _read_arguments(self, read: Callable[[str], Steps[None]]) -> Steps[bool]:
        """Emit all arguments but for the last brace; False: the text ends within one. `read` gets what is before it."""
        self._arguments("{")
        separator = ""
        while (yield from self._attempt(read(separator))):
            separator = ", "
            if not self._has_ended:
                if self._is_cut:
                    self._drop_cut_markup()
                return False
        return True

    def _begin_argument(self, separator: str, key: str) -> None:
        """Emit the name of an argument; from here on there is no backtracking."""
        self._marked = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")

    def _read_named_tag(self, opening: str, end: str) -> Steps[str]:
        """Read a tag with a name, which is returned."""
        yield from self._expect_next(opening)
        name = (yield from self._read_while(self.name_text)).strip()
        yield from self._expect(end)
        if not name or not name.isprintable():
            raise MalformedError(opening)
        return name

    def _read_value(self, function: str, key: str, ends: tuple[str, ...]) -> Steps[None]:
        """Emit the value of argument `key` as JSON: the text up to one of `ends`, which comes next unless text ends."""
        root = self._schemas[function]
        found = list(_declarations(root, root, key, 0))  # several where unions or references declare it
        schema = {"anyOf": found} if len(found) > 1 else next(iter(found), None)
        is_text = schema is None or schema.get("type") == "string"
        if is_text:
            self._arguments('"')
        pieces: list[str] = []
        emit: Emit = self._escaped if is_text else pieces.append
        self._has_ended = yield from self._copy_until(ends, emit)
        if self._has_ended:
            text = self._rest
            space = text[: len(text) - len(text.lstrip())]
            self._skip(len(space))
            emit(self._without_markup(space))
            self._arguments('"' if schema is None or is_text else json_value("".join(pieces), schema, root))

    def _without_markup(self, space: str) -> str:
        """Return the part of the white space before the end of a value that belongs to the value."""
        return space

    def _escaped(self, text: str) -> None:
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def is_tellable(parameter: Parameter) -> bool:
    """Whether a grammar without quotes around strings can say which values a parameter may have."""
    return not (parameter.is_string and parameter.strings is None)


def value_rule(parameter: Parameter, text: str, end: str) -> str:
    """Return the expression of a value and its end tag; `text` is the rule of any string and the tag."""
    if not parameter.is_string:
        return f"{json_rule(parameter.schema)} {quoted(end)}"
    if not parameter.strings:
        return text
    return f"({' | '.join(map(quoted, parameter.strings))}) {quoted(end)}"


def names_of(schema: Schema) -> set[str]:
    """Return the names of the arguments that a schema declares at its top."""
    properties = schema.get("properties")
    return {str(name) for name in properties} if isinstance(properties, Mapping) else set()


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
