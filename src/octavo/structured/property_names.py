"""Says what JSON Schema's `propertyNames` says with keywords that the grammar library has."""

from collections.abc import Callable

from octavo.structured.disjoint import properties_of, resolved, types_of
from octavo.structured.keywords import PLACES, Schema, is_well_formed

Fits = Callable[[str, str], bool]  # whether a text matches a pattern
_NAME_FORMATS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}


def with_named_properties(schema: Schema, root: Schema, fits: Fits) -> Schema:
    """Say what `propertyNames` says with `properties` or `patternProperties`."""
    result = {name: value for name, value in schema.items() if name != "propertyNames"}
    names = resolved(schema["propertyNames"], root)
    if names is True or (isinstance(names, dict) and not _limits(names)):
        return result
    if (
        not isinstance(names, dict)
        or not is_well_formed(names)
        or "patternProperties" in schema
        or "string" not in types_of(names)
    ):
        return schema
    own = properties_of(schema)
    other = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    if (listed := _listed(names)) is not None:
        allowed = {name: own.get(name, other) for name in listed}
        kept = allowed | {name: False for name in own if name not in allowed}
        return result | {"properties": kept, "additionalProperties": False}
    pattern = _pattern(names)
    if pattern is None or (own and other not in (True, {}, False)):  # a named property would have to match that, too
        return schema
    if own:
        result["properties"] = {name: inner if fits(pattern, name) else False for name, inner in own.items()}
    more = {} if other is False else {"patternProperties": {pattern: other}}
    return result | more | {"additionalProperties": False}


def _limits(names: Schema) -> set[str]:
    """Return the keywords that limit a string."""
    return names.keys() & {"enum", "const", "pattern", "minLength", "maxLength", "format", *PLACES}


def _listed(names: Schema) -> list[str] | None:
    values = [names["const"]] if "const" in names else names.get("enum")
    if _limits(names) - {"const", "enum"} or not isinstance(values, list):
        return None
    return [value for value in values if isinstance(value, str)]


def _pattern(names: Schema) -> str | None:
    """Return the pattern of a string's form; None if one pattern cannot say it."""
    keywords = _limits(names)
    if keywords == {"pattern"}:
        return str(names["pattern"])
    if "format" in keywords and names["format"] in _NAME_FORMATS and keywords <= {"format", "pattern"}:
        return str(names.get("pattern", _NAME_FORMATS[names["format"]]))
    if keywords <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
