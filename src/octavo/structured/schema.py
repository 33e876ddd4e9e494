"""JSON schemas as the grammar compiler reads them, and where in one a fault lies."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Those that llguidance holds an answer to. By the standard any other `format` is a remark, so it is left out.
ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
MAX_LEAST_COUNT = 65_536  # of `minItems` and the like: more than any context holds
SEARCH_BYTES = 1 << 20  # of schemas looked at for where a fault lies: 0.2 s
LOOK_BYTES = 1 << 11  # that a look costs beside those it reads
_OPTIONS = {
    # Room for the pretty-printing of models, and an end to a model that would write spaces for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\r\t]{0,32}",
    "coerce_one_of": False,  # `oneOf` whose branches overlap is refused: what comes out must match exactly one
    "lenient": False,  # a keyword that cannot be held to is an error
}
_LEAST_COUNTS = ("minItems", "minLength", "minProperties", "minContains")
_MAPS_OF_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def compiler_schema(text: str) -> str:
    """Return a JSON schema with our options for the compiler, and without formats that are only remarks."""
    schema = _without_remarks(json.loads(text))
    schema["x-guidance"] = _OPTIONS
    return json.dumps(schema, ensure_ascii=True, separators=(",", ":"))


def find_excess(text: str) -> tuple[str, str] | None:
    """Return where a schema asks for more than any answer can hold, and the limit."""
    for path, schema in _all_schemas("$", json.loads(text)):
        for name in _LEAST_COUNTS:
            count = schema.get(name)
            if isinstance(count, (int, float)) and count > MAX_LEAST_COUNT:
                return f"{path}.{name}", f"{count} is more than {MAX_LEAST_COUNT}"
    return None


def locate_fault(text: str, error: str, why_not: Callable[[str], str | None]) -> tuple[str, str]:
    """Return the path of the innermost schema that is at fault, and what `why_not` says of it.

    `error` is what it says of the whole.
    """
    schema = json.loads(text)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
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
    """Yield the schemas directly inside one, with their paths."""
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
    for _, inner in _all_schemas("$", schema):
        if isinstance(inner.get("format"), str) and inner["format"] not in ENFORCED_FORMATS:
            del inner["format"]
    return schema
