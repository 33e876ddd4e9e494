"""Prepares JSON schemas for llguidance and locates errors in them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.structured.disjoint import ALL_TYPES
from octavo.structured.rewrite import MAX_COUNTED_LENGTH, rewritten

# The formats that llguidance enforces. By the standard, any other `format` is an annotation, so it is removed.
ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
MAX_LEAST_COUNT = 65_536  # of `minItems` and the like: more than any context holds
MAX_LEAST_LENGTH = MAX_COUNTED_LENGTH  # of all strings together
SEARCH_BYTES = 1 << 20  # limit on the search for the location of an error: 0.2 s
LOOK_BYTES = 1 << 11  # fixed cost per candidate, in addition to its size
_OPTIONS = {
    # What a formatter writes between two tokens of JSON: nothing, one space, or a line break and an indent.
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\r?\n( {0,16}|\t{0,8}))?",
    "coerce_one_of": False,  # `oneOf` with overlapping branches is an error: the output must match exactly one
    "lenient": False,  # unsupported keywords are errors
}
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_LEAST_COUNTS = ("minItems", "minLength", "minProperties", "minContains")
_MAY_BE_NULL = ("const", "default", "example")
_MAPS_OF_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def compiler_schema(text: str) -> str:
    """Return a JSON schema in the compiler's language, with our options."""
    root = _without_remarks(json.loads(text))

    def whole(schema: Any) -> Any:
        return _with_children(rewritten(schema, root), whole)

    schema = whole(root)
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    schema["x-guidance"] = _OPTIONS
    return json.dumps(schema, ensure_ascii=True, separators=(",", ":"))


def _with_children(schema: Any, rewrite: Callable[[Any], Any]) -> Any:
    """Return a schema with its direct subschemas rewritten."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, inner in schema.items():
        if name in _MAPS_OF_SCHEMAS and isinstance(inner, dict):
            result[name] = {key: rewrite(child) for key, child in inner.items()}
        elif name in _LISTS_OF_SCHEMAS and isinstance(inner, list):
            result[name] = [rewrite(child) for child in inner]
        elif name in _SCHEMAS:
            result[name] = rewrite(inner)
    return result


def advice(fault: str) -> str:
    """Return the library's message about a schema in terms of what its author can change."""
    if "coerce_one_of" in fault:
        return "oneOf: its branches may overlap; use anyOf, or let each require a property with a const of its own"
    if unknown := _UNKNOWN_KEYWORDS.match(fault):
        return f"unsupported keywords: {unknown[1]}; leave them out and check the answer yourself"
    if fault.startswith("Invalid type: "):
        return f"{fault}; one of {', '.join(sorted(ALL_TYPES))}"
    if "look-around" in fault:
        return f"{fault} in patterns"
    return fault


def find_excess(text: str) -> tuple[str, str] | None:
    """Return where a schema requires more than any output can contain, and the limit."""
    total = 0.0
    for path, schema in _all_schemas("$", json.loads(text)):
        for name in _LEAST_COUNTS:
            count = schema.get(name)
            if not isinstance(count, (int, float)):
                continue
            if count > MAX_LEAST_COUNT:
                return f"{path}.{name}", f"{count} is more than {MAX_LEAST_COUNT}"
            total += count if name == "minLength" else 0
            if total > MAX_LEAST_LENGTH:
                return f"{path}.{name}", f"minLength of all strings is more than {MAX_LEAST_LENGTH} characters"
    return None


def locate_fault(text: str, error: str, why_not: Callable[[str], str | None]) -> tuple[str, str]:
    """Return the path of the innermost invalid schema and the message of `why_not` for it.

    `error` is the message for the whole schema.
    """
    schema = json.loads(text)
    shared = {name: schema[name] for name in ("$defs", "definitions", "components") if name in schema}
    path, budget = "$", SEARCH_BYTES
    while True:
        for child_path, child in _children(path, schema):
            candidate = json.dumps(shared | child)
            budget -= LOOK_BYTES + len(candidate)
            if budget < 0:
                return path, error
            if (found := why_not(candidate)) is not None:
                path, schema, error = child_path, child, found
                break
        else:
            return path, error


def _children(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas with their paths."""
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(inner := schema.get(name), dict):
            yield from ((f"{path}.{name}.{key}", child) for key, child in inner.items() if isinstance(child, dict))
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(inner := schema.get(name), list):
            yield from ((f"{path}.{name}[{i}]", child) for i, child in enumerate(inner) if isinstance(child, dict))
    for name in _SCHEMAS:
        if isinstance(inner := schema.get(name), dict):
            yield f"{path}.{name}", inner


def _all_schemas(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for child_path, child in _children(path, schema):
        yield from _all_schemas(child_path, child)


def _without_remarks(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove formats that are annotations, and keywords that a serializer wrote as null because they are not set."""
    for _, inner in _all_schemas("$", schema):
        for name in [name for name, value in inner.items() if value is None and name not in _MAY_BE_NULL]:
            del inner[name]
        if isinstance(inner.get("format"), str) and inner["format"] not in ENFORCED_FORMATS:
            del inner["format"]
    return schema
