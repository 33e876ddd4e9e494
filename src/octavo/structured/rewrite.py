"""Rewrites keywords of JSON Schema that the grammar library lacks into those that it has.

What generators of schemas write (Zod, pydantic, protobuf, Java): `propertyNames`, `oneOf`, `not: {}`, bounds of 64
bits, `dependentRequired`, `unevaluatedProperties`. Every output of the rewritten schema matches the original one; a
keyword that cannot be kept so stays, and the library names it.
"""

from typing import Any

from octavo.structured.discriminated import with_tags
from octavo.structured.disjoint import are_disjoint, properties_of, required, resolved, spelled, types_of, values_of
from octavo.structured.keywords import DEPENDENT, PLACES, Schema, is_well_formed
from octavo.structured.look_around import without_look_around
from octavo.structured.property_names import Fits, with_named_properties

# Characters of a string that the library can count before its lexer has too many states: up to a dozen for each.
MAX_COUNTED_LENGTH = 7_500
_LARGEST = 2**63 - 1024  # what the library's numbers hold, as a 64-bit float
_NO_LIMIT = 3.4e38  # bounds of floats and doubles say nothing
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def rewritten(schema: Any, root: Schema, fits: Fits) -> Any:
    """Return one schema rewritten, without its subschemas; `root` has the definitions."""
    if not isinstance(schema, dict) or not is_well_formed(schema):  # the library names what is wrong
        return schema
    if _is_never(schema):
        return False
    result = dict(schema)
    if result.get("not") is False:
        del result["not"]
    if result.get("uniqueItems") is False or ("uniqueItems" in result and result.get("maxItems") in (0, 1)):
        del result["uniqueItems"]
    _limit_bounds(result)
    if isinstance(most := result.get("maxLength"), int) and most > MAX_COUNTED_LENGTH:
        result["maxLength"] = MAX_COUNTED_LENGTH  # the string is closed there, rather than the answer cut off
    if "propertyNames" in result:
        result = with_named_properties(result, root, fits)
    _close(result, root)
    if "pattern" in result:
        result["pattern"] = without_look_around(result["pattern"])
    for rewrite in (
        _excluded_types,
        _excluded_properties,
        _dependencies,
        _condition,
        _least_properties,
        _exclusive_branches,
    ):
        result = rewrite(result, root)
    return result


def _is_never(schema: Schema) -> bool:
    return schema.get("not") in ({}, True) and "not" in schema


def _limit_bounds(schema: Schema) -> None:
    """Keep bounds within the library's numbers: beyond 64 bits for doubles there is no bound."""
    for names, sign in ((_LOW, -1), (_HIGH, 1)):
        for name in names:
            bound = schema.get(name)
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound * sign < _LARGEST:
                continue
            is_integer = types_of(schema) & {"integer", "number"} == {"integer"}
            if not is_integer and bound * sign >= _NO_LIMIT:
                del schema[name]
            elif not (is_integer and sign > 0):  # there the library has the limit itself
                schema[name] = sign * _LARGEST


def _close(schema: Schema, root: Schema) -> None:
    """Say what `unevaluatedProperties` and `unevaluatedItems` say with older keywords, where the parts are known."""
    rest = schema.get("unevaluatedProperties")
    if "unevaluatedProperties" in schema and (rest in (True, {}) or "additionalProperties" in schema):
        del schema["unevaluatedProperties"]  # nothing is left that it could be about
    elif "unevaluatedProperties" in schema and (known := _named(schema, root)) is not None:
        del schema["unevaluatedProperties"]
        schema["properties"] = dict.fromkeys(known, True) | properties_of(schema)
        schema["additionalProperties"] = rest
    if "unevaluatedItems" in schema and not any(name in schema for name in (*PLACES, "contains")):
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _named(schema: Any, root: Schema, steps: int = 8) -> list[str] | None:
    """Return the properties that other schemas of the same object name; None if that depends on the object."""
    if not isinstance(schema, dict) or steps == 0:
        return None
    if any(name in schema for name in ("anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef")):
        return None
    names: list[str] = []
    parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    if "$ref" in schema:
        parts.append(resolved({"$ref": schema["$ref"]}, root))
    for part in parts:
        inner = _named(part := resolved(part, root), root, steps - 1)
        if inner is None or "patternProperties" in part or part.get("additionalProperties", False) is not False:
            return None
        names += [*properties_of(part), *inner]
    return names


def _excluded_types(schema: Schema, _: Schema) -> Schema:
    """Say `not: {type: ...}` with the types that are left."""
    ban = schema.get("not")
    if not isinstance(ban, dict) or ban.keys() != {"type"}:
        return schema
    left = types_of(schema) - types_of(ban)
    if "integer" in types_of(ban) and "number" in left:  # a fraction is no type
        return schema
    if "number" in left:
        left -= {"integer"}
    result = {name: value for name, value in schema.items() if name != "not"}
    return result | {"type": sorted(left)}


def _excluded_properties(schema: Schema, _: Schema) -> Schema:
    """Say `not: {required: ...}` with properties that may not be there, as protobuf's generators mean no field."""
    ban = schema.get("not")
    bans = ban["anyOf"] if isinstance(ban, dict) and ban.keys() == {"anyOf"} else [ban]
    if (
        "object" not in types_of(schema)
        or not isinstance(bans, list)
        or not bans
        or not all(isinstance(each, dict) and each.keys() == {"required"} for each in bans)
    ):
        return schema
    names = [required(each) for each in bans]
    if any(not some or some != each["required"] for some, each in zip(names, bans, strict=True)):
        return schema
    result = {name: value for name, value in schema.items() if name != "not"}
    absent = {some[0]: False for some in names if len(some) == 1}
    result |= {"type": "object", "properties": properties_of(schema) | absent}
    if more := [{"anyOf": [{"properties": {name: False}} for name in some]} for some in names if len(some) > 1]:
        result["allOf"] = [*result.get("allOf", []), *more]
    return result


def _dependencies(schema: Schema, _: Schema) -> Schema:
    """Say that a property needs others with two branches: one without it, one with all of them."""
    result, rules = dict(schema), []
    for keyword in DEPENDENT:
        for name, need in result.pop(keyword, {}).items():
            with_it = {"required": [name, *need]} if isinstance(need, list) else {"allOf": [need, {"required": [name]}]}
            rules.append({"anyOf": [{"properties": {name: False}}, with_it]})
    return result | {"allOf": [*result.get("allOf", []), *rules]} if rules else schema


def _condition(schema: Schema, root: Schema) -> Schema:
    """Say `if` with branches, where it asks for values of one property that has a list of them."""
    test, own = schema.get("if"), schema.get("properties")
    if not isinstance(test, dict) or not isinstance(own, dict) or not isinstance(test.get("properties"), dict):
        return schema
    if len(test["properties"]) != 1 or not test.keys() <= {"properties", "required", "type"}:
        return schema
    ((name, wanted),) = test["properties"].items()
    values, listed = values_of(resolved(own.get(name), root)), values_of(wanted)
    if values is None or listed is None or not set(required(test)) <= {name} or types_of(schema) != {"object"}:
        return schema
    branches: list[Schema] = [{"allOf": [{"properties": {name: False}}]}]
    is_met, met = not required(test), set(map(spelled, listed))  # without the property
    branches[0]["allOf"].append(schema.get("then" if is_met else "else", True))
    for keyword in ("then", "else"):
        if some := [value for value in values if (spelled(value) in met) == (keyword == "then")]:
            form = {"properties": {name: {"enum": some}}, "required": [name]}
            branches.append({"allOf": [form, schema.get(keyword, True)]})
    result = {key: value for key, value in schema.items() if key not in ("if", "then", "else")}
    return result | {"allOf": [*result.get("allOf", []), {"anyOf": branches}]}


def _least_properties(schema: Schema, _: Schema) -> Schema:
    """Say `minProperties: 1` of an object whose properties are named and may be left out."""
    names = schema.get("properties")
    if schema.get("minProperties") != 1 or not isinstance(names, dict) or not names or "maxProperties" in schema:
        return schema
    result = {name: value for name, value in schema.items() if name != "minProperties"}
    if required(schema):
        return result
    one = {"anyOf": [{"required": [name]} for name in names]}
    return result | {"allOf": [*result.get("allOf", []), one]}


def _exclusive_branches(schema: Schema, root: Schema) -> Schema:
    """Say `oneOf` with `anyOf`: its branches exclude each other, or do so without a property that others require."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) > 64:
        return schema
    own: Schema = {name: schema[name] for name in ("type", "properties", "additionalProperties") if name in schema}
    narrowed = _narrowed(branches, own, root)
    if narrowed is None and own.get("type") == "object" and all(isinstance(branch, dict) for branch in branches):
        typed = [{"type": "object", **_excluded_properties(branch, root)} for branch in branches]
        narrowed = _narrowed(typed, own, root)
    if narrowed is None:
        narrowed = with_tags(schema, branches, root)
    if narrowed is None:
        return schema
    result = {name: value for name, value in schema.items() if name != "oneOf"}
    if "anyOf" in result:
        return result | {"allOf": [*result.get("allOf", []), {"anyOf": narrowed}]}
    return result | {"anyOf": narrowed}


def _narrowed(branches: list[Any], own: Schema, root: Schema) -> list[Any] | None:
    """Return the branches without what they have in common; None if it is not known how."""
    narrowed = []
    for index, branch in enumerate(branches):
        others = [each for place, each in enumerate(branches) if place != index]
        if (kept := _without(branch, others, own, root)) is None:
            return None
        narrowed.append(kept)
    return narrowed


def _without(branch: Any, others: list[Any], own: Schema, root: Schema) -> Any | None:
    """Return `branch` with nothing in common with the others; None if it is not known how."""
    banned: dict[str, bool] = {}
    plain = resolved(branch, root)
    for other in others:
        if are_disjoint({"allOf": [own, branch]}, other, root) or are_disjoint(branch, {"allOf": [own, other]}, root):
            continue
        opposite = resolved(other, root)
        if not isinstance(plain, dict) or not isinstance(opposite, dict):
            return None
        if types_of({**own, **plain}) != {"object"} and types_of({**own, **opposite}) != {"object"}:
            return None
        if not (only := [name for name in required(opposite) if name not in required(plain)]):
            return None
        banned[only[0]] = False
    if not banned:
        return branch
    if plain is branch:
        return {**branch, "properties": properties_of(branch) | banned}
    return {"allOf": [branch, {"properties": banned}]}  # a copy of what is referred to might contain itself
