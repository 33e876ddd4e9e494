"""What is known of JSON Schema's keywords before a schema has been checked."""

from typing import Any

Schema = dict[str, Any]
# Other schemas of the same value.
PLACES = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not")
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_KINDS: dict[tuple[str, ...], type | tuple[type, ...]] = {
    ("properties", "patternProperties", *DEPENDENT): dict,
    ("allOf", "anyOf", "oneOf", "required"): list,
    ("pattern", "format", "$ref"): str,
    ("minLength", "maxLength", "minProperties"): int,
    ("type",): (str, list),
}


def is_well_formed(schema: Schema) -> bool:
    """Whether the keywords that are read here have values of their kind."""
    return all(
        isinstance(schema[name], kind) for names, kind in _KINDS.items() for name in names if name in schema
    ) and all(isinstance(need, (list, dict, bool)) for need in _all_needs(schema))


def _all_needs(schema: Schema) -> list[Any]:
    return [need for name in DEPENDENT if name in schema for need in schema[name].values()]
