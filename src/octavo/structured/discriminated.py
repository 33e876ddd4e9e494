"""Tells the branches of a `oneOf` apart by a property, as the generators of schemas mean them.

pydantic does not require a tag that has a default; OpenAPI's `discriminator` says a tag's values without a `const`.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from octavo.structured.disjoint import are_disjoint, properties_of, required, resolved, types_of
from octavo.structured.keywords import Schema


def with_tags(schema: Schema, branches: list[Any], root: Schema) -> list[Any] | None:
    """Return the branches, each of which requires a property that no two of them share a value of; None if none is."""
    plain = [resolved(branch, root) for branch in branches]
    if not all(
        isinstance(each, dict) and types_of({"type": schema.get("type"), **each}) == {"object"} for each in plain
    ):
        return None
    for name in properties_of(plain[0]):
        values = [properties_of(each).get(name, True) for each in plain]
        if all(are_disjoint(*pair, root) for pair in combinations(values, 2)):
            return [_and(branch, each, {"required": [name]}) for branch, each in zip(branches, plain, strict=True)]
    return _mapped(schema, branches, plain)


def _mapped(schema: Schema, branches: list[Any], plain: list[Any]) -> list[Any] | None:
    """Tag branches that are references with the values that OpenAPI's `discriminator` maps to them, or their names."""
    rule = schema.get("discriminator")
    if not isinstance(rule, Mapping) or not isinstance(name := rule.get("propertyName"), str):
        return None
    mapping = rule["mapping"] if isinstance(rule.get("mapping"), Mapping) else {}
    tagged: list[Any] = []
    used: set[object] = set()
    for branch, each in zip(branches, plain, strict=True):
        if not isinstance(branch, dict) or not isinstance(target := branch.get("$ref"), str):
            return None
        last = target.rpartition("/")[2]
        values = [value for value, to in mapping.items() if to in (target, last)] or [last]
        if used.intersection(values):
            return None
        used.update(values)
        tagged.append(_and(branch, each, {"properties": {name: {"enum": values}}, "required": [name]}))
    return tagged


def _and(branch: Schema, plain: Schema, more: Schema) -> Schema:
    if plain is branch and "properties" not in more:
        return {**branch, "required": [*required(branch), *more["required"]]}
    return {"allOf": [branch, more]}  # a copy of what is referred to might contain itself
