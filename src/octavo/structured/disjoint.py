"""Proves that two JSON schemas have no value in common, so that `oneOf` them is `anyOf` them.

False means unproven. References are followed to a depth that no honest proof needs.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

Schema = Mapping[str, Any]
MAX_STEPS = 8  # references and nested properties
TYPE_NAMES: Mapping[type, str] = {
    str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array", int: "integer", float: "number",
}  # fmt: skip
# Formats of which no text has two.
_SEPARATE_FORMATS = frozenset({"date", "date-time", "duration", "email", "ipv4", "ipv6", "time", "uuid"})
_COUNTS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}
_REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
ALL_TYPES = frozenset({"string", "boolean", "null", "object", "array", "integer", "number"})


def resolved(schema: Any, root: Schema, steps: int = MAX_STEPS) -> Any:
    """Return what a schema that is only a reference, apart from remarks, refers to; any other schema as it is."""
    while steps > 0 and isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        target: Any = root
        pointer = schema["$ref"]
        if not pointer.startswith("#") or not _REMARKS.issuperset(schema.keys() - {"$ref"}):
            return schema
        for part in filter(None, unquote(pointer[1:]).split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                return schema
            target = target[name]
        schema, steps = target, steps - 1
    return schema


def are_disjoint(one: Any, other: Any, root: Schema, steps: int = MAX_STEPS) -> bool:
    """Whether no value matches both."""
    one, other = resolved(one, root), resolved(other, root)
    if one is False or other is False:
        return True
    if steps == 0 or not isinstance(one, dict) or not isinstance(other, dict):
        return False
    common = types_of(one) & types_of(other)
    return (
        not common
        or any(_excludes_all(*pair, root, steps) for pair in ((one, other), (other, one)))
        # A property that one of them requires has no value that both allow.
        or (
            common == {"object"}
            and any(
                are_disjoint(_property(this, name), _property(that, name), root, steps - 1)
                for this, that in ((one, other), (other, one))
                for name in required(this)
            )
        )
    )


def _excludes_all(one: Schema, other: Schema, root: Schema, steps: int) -> bool:
    """Whether the values, the branches or the range of `one` lie outside of `other`."""
    values = values_of(one)
    if values is not None and all(_excludes(other, value) for value in values):
        return True
    for name, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)):
        branches = one.get(name)
        if isinstance(branches, list) and enough(are_disjoint(each, other, root, steps - 1) for each in branches):
            return True
    formats = {each for each in (one.get("format"), other.get("format")) if isinstance(each, str)}
    formats_differ = types_of(one) & types_of(other) == {"string"} and len(formats) == 2
    return _lies_below(one, other) or _is_shorter(one, other) or (formats_differ and formats <= _SEPARATE_FORMATS)


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types that a schema's `type` allows; an integer is a number as well."""
    given = schema.get("type")
    listed = [given] if isinstance(given, str) else given
    names = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ALL_TYPES
    return names | {"integer"} if "number" in names else names


def values_of(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _excludes(schema: Schema, value: Any) -> bool:
    """Whether a value is of no allowed type, not among the listed values, or outside the range."""
    if TYPE_NAMES.get(type(value), "") not in types_of(schema):
        return not (isinstance(value, float) and value.is_integer() and "integer" in types_of(schema))
    values = values_of(schema)
    if values is not None and spelled(value) not in map(spelled, values):
        return True
    if not _is_number(value):
        return False
    (low, above), (high, below) = _lowest(schema), _highest(schema)
    return value < low or value > high or (value == low and above) or (value == high and below)


def _lowest(schema: Schema) -> tuple[float, bool]:
    """Return the lower end of a schema's numbers, and whether it is left out."""
    return max(_ends(schema, "minimum", "exclusiveMinimum"), default=(-math.inf, False))


def _highest(schema: Schema) -> tuple[float, bool]:
    """Return the upper end of a schema's numbers, and whether it is left out."""
    ends = _ends(schema, "maximum", "exclusiveMaximum")
    return min(ends, key=lambda end: (end[0], not end[1]), default=(math.inf, False))


def _ends(schema: Schema, name: str, exclusive: str) -> list[tuple[float, bool]]:
    last, beyond = schema.get(name), schema.get(exclusive)  # once the latter was a flag
    return [(end, is_out) for end, is_out in ((last, beyond is True), (beyond, True)) if _is_number(end)]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def spelled(value: Any) -> str:
    """Return one text for all spellings of a JSON value; to Python, true equals 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _lies_below(one: Schema, other: Schema) -> bool:
    """Whether all numbers in `one` are less than those in `other`; both must be numeric."""
    if not (types_of(one) | types_of(other)) <= {"integer", "number"}:
        return False
    (high, below), (low, above) = _highest(one), _lowest(other)
    return high < low or (high == low and (below or above))


def _is_shorter(one: Schema, other: Schema) -> bool:
    """Whether all strings or arrays in `one` are shorter than those in `other`."""
    common = types_of(one) & types_of(other)
    if len(common) != 1 or not common <= _COUNTS.keys():
        return False
    names = _COUNTS[next(iter(common))]
    least, most = other.get(names[0]), one.get(names[1])
    return _is_number(most) and _is_number(least) and most < least


def required(schema: Schema) -> list[str]:
    """Return the names that a schema requires."""
    names = schema.get("required", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def properties_of(schema: Any) -> dict[str, Any]:
    """Return the properties that a schema names."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _property(schema: Schema, name: str) -> Any:
    if name in (properties := properties_of(schema)):
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
