"""Closes the JSON schemas of requests: objects have the properties that a schema names, and no others.

By the standard, an object without `additionalProperties` may have any further properties, and a weak model never stops
writing them. OpenAI rejects such schemas in strict mode; vLLM and llama.cpp read them as closed, and so does Octavo.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties")
_ONES = ("items", "additionalProperties")
_SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Next to these, other schemas name properties of the same object: closing one of them would forbid those of the others.
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
_BRANCHES = ("anyOf", "oneOf")

Schema = Mapping[str, Any]


def closed(schema: Schema, *, strict: bool) -> Schema:
    """Return the schema with objects closed that name properties; with `strict`, also those that name none.

    Objects that say otherwise (`additionalProperties`) or are described in several places stay as they are.
    """
    maps = _MAPS if any(map(_combines_references, _all_nodes(schema))) else (*_MAPS, *_DEFINITIONS)
    result: Schema = _closed(schema, strict, maps, {})
    return result


def closed_arguments(schema: Schema, *, strict: bool) -> Schema:
    """Return the schema of a tool's arguments, closed; one that names no properties allows `{}` only."""
    if not schema.get("properties") and _may_close(schema):
        return {"type": "object", "properties": {}, **schema, "additionalProperties": False}
    return closed(schema, strict=strict)


def takes_nothing(arguments: Schema) -> bool:
    """Whether `{}` is all that a tool takes."""
    return not arguments.get("properties") and arguments.get("additionalProperties") is False


def _closed(schema: Any, strict: bool, maps: tuple[str, ...], beside: Mapping[str, Any] | None) -> Any:
    """Close one schema; `beside`: what schemas around a branch name for the same object, None if not known."""
    if not isinstance(schema, Mapping):  # true, false, or an error that is reported later, with its place
        return schema
    result = dict(schema)
    for name, inner in schema.items():
        if name in maps and isinstance(inner, Mapping):
            result[name] = {key: _closed(child, strict, maps, {}) for key, child in inner.items()}
        elif name in (*_BRANCHES, "prefixItems") and isinstance(inner, list):
            shared = {} if name == "prefixItems" else _beside(schema, beside)
            result[name] = [_closed(child, strict, maps, shared) for child in inner]
        elif name in _ONES:
            result[name] = _closed(inner, strict, maps, {})
    own, kind = schema.get("properties"), schema.get("type")
    if beside is None or not (own or (strict and (kind == "object" or (isinstance(kind, list) and "object" in kind)))):
        return result
    whole = result
    if beside and isinstance(own, Mapping | None):  # before its own, as they are written
        whole = result | {"properties": {**dict.fromkeys(beside, True), **result.get("properties", {})}}
    return whole | {"additionalProperties": False} if _may_close(whole) else result


def _beside(schema: Schema, beside: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the properties that a schema and those around it name next to its branches; None if not known."""
    others = ("allOf", "$ref", "if", "dependentSchemas", "patternProperties")
    own = schema.get("properties", {})
    if beside is None or not isinstance(own, Mapping) or all(name in schema for name in _BRANCHES):
        return None
    return None if any(name in schema for name in others) else {**beside, **own}


def _may_close(schema: Schema) -> bool:
    """Whether all properties are named here, among them those that the object must have."""
    if any(name in schema for name in (*_SAYS, *_COMBINES)):
        return False
    properties, required, least = schema.get("properties", {}), schema.get("required", []), schema.get("minProperties")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    has_required = all(isinstance(name, str) and name in properties for name in required)
    return has_required and (least is None or least in range(len(properties) + 1))


def _combines_references(node: Schema) -> bool:
    """Whether definitions may describe one object together with other schemas."""
    branches = node.get("allOf", [])
    num_branches = len(branches) if isinstance(branches, list) else 0
    lists = [node[name] for name in _BRANCHES if isinstance(node.get(name), list)]
    if node.get("properties") and any(isinstance(each, Mapping) and "$ref" in each for each in chain(*lists)):
        return True
    return num_branches + ("$ref" in node) + ("properties" in node) > 1 and num_branches + ("$ref" in node) > 0


def _all_nodes(schema: object) -> Iterator[Schema]:
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            yield node
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
