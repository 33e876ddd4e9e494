"""Values that formats write without quotes or in Python's spelling, as JSON of the types that a tool's schema declares.

A text such as `123` may be a number or a string, `None` a null or a name. `json_value` takes the reading that the
schema allows, through references and unions; if it allows several, JSON before Python's spelling before plain text.
"""

import ast
import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from octavo.server.openai.parsers.base import MalformedError

Schema = Mapping[str, object]

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_UNIONS = ("anyOf", "oneOf")
_MAX_DEPTH = 32  # of references and unions within one another
_JSON_NAMES: dict[str, object] = {"true": True, "false": False, "null": None}
_BOOLEANS = {"true": True, "false": False}
_NAMES: Sequence[tuple[type, frozenset[str]]] = (
    (type(None), frozenset({"null"})),
    (bool, frozenset({"boolean"})),
    (str, frozenset({"string"})),
    (int, frozenset({"integer", "number"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)


def parameter_schema(root: Schema, name: str) -> Schema | None:
    """Return the schema of one argument, also where unions or references declare it; None: it is not declared."""
    found = list(_declarations(root, root, name, 0))
    return {"anyOf": found} if len(found) > 1 else next(iter(found), None)


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


def _type_names(value: object) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    return next(names for kind, names in _NAMES if isinstance(value, kind))


def _types(schema: object, root: Schema, depth: int) -> frozenset[str]:
    """Return the types that a schema allows; all if it says nothing."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset() if schema is False else _TYPES
    types, declared = _TYPES, schema.get("type")
    if isinstance(declared, (str, list)):
        types &= frozenset([declared] if isinstance(declared, str) else map(str, declared)) or _TYPES
    if values := _own_values(schema):
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
    yield from _own_values(schema)
    for branch in _parts(schema, root):
        yield from _listed(branch, root, depth + 1)


def _declarations(schema: object, root: Schema, name: str, depth: int) -> Iterator[Schema]:
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


def _own_values(schema: Mapping[str, Any]) -> list[object]:
    values = schema.get("enum")
    return [schema["const"]] if "const" in schema else list(values) if isinstance(values, list) else []


def _branches(schema: Mapping[str, Any], name: str) -> list[object]:
    branches = schema.get(name)
    return branches if isinstance(branches, list) else []


def _referred(schema: Mapping[str, Any], root: Schema) -> list[object]:
    """Return what a local reference, `#/$defs/name`, points to; nothing for any other."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return []
    place: object = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or key not in place:
            return []
        place = place[key]
    return [place]


def literal_value(text: str) -> object:
    """Return the value of a text such as `{'a': [True, None]}`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # models write unknown escapes
            return value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError("value") from error


def value_of(node: ast.expr) -> object:
    """Return the value of a literal. Raises MalformedError for any other expression."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key_of(value_of(key) if key is not None else None) for key in keys]
            return dict(zip(names, map(value_of, values), strict=True))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise MalformedError("value")


def key_of(name: object) -> str:
    if not isinstance(name, str):
        raise MalformedError("key")
    return name
