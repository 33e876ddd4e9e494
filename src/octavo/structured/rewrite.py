"""Rewrites keywords of JSON Schema that llguidance lacks into those that it has.

What generators of schemas write (Zod, pydantic, protobuf, Java): `propertyNames`, `oneOf`, `not: {}`, bounds of 64
bits, `dependentRequired`, `unevaluatedProperties`. Every output of the rewritten schema matches the original one; a
keyword that cannot be kept so stays, and the library names it.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from octavo.structured.disjoint import are_disjoint, properties_of, required, resolved, spelled, types_of, values_of
from octavo.structured.patterns import matches, without_look_around

Schema = dict[str, Any]
# Characters of a string that the library can count before its lexer has too many states: up to a dozen for each.
MAX_COUNTED_LENGTH = 7_500
_LARGEST = 2**63 - 1024  # what the library's numbers hold, as a 64-bit float
_NO_LIMIT = 3.4e38  # bounds of floats and doubles say nothing
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# Other schemas of the same value.
_PLACES = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_KINDS: dict[tuple[str, ...], type | tuple[type, ...]] = {
    ("properties", "patternProperties", *_DEPENDENT): dict,
    ("allOf", "anyOf", "oneOf", "required"): list,
    ("pattern", "format", "$ref"): str,
    ("minLength", "maxLength", "minProperties"): int,
    ("type",): (str, list),
}
_NAME_FORMATS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}


def rewritten(schema: Any, root: Schema) -> Any:
    """Return one schema rewritten, without its subschemas; `root` has the definitions."""
    if not isinstance(schema, dict) or not _is_well_formed(schema):  # the library names what is wrong
        return schema
    if "not" in schema and schema["not"] in ({}, True):
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
        result = _with_named_properties(result, root)
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


def _is_well_formed(schema: Schema) -> bool:
    """Whether the keywords that are read here have values of their kind."""
    if not all(isinstance(schema[name], kind) for names, kind in _KINDS.items() for name in names if name in schema):
        return False
    needs = [need for name in _DEPENDENT if name in schema for need in schema[name].values()]
    return all(isinstance(need, (list, dict, bool)) for need in needs)


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
    if "unevaluatedItems" in schema and not any(name in schema for name in (*_PLACES, "contains")):
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


def _with_named_properties(schema: Schema, root: Schema) -> Schema:
    """Say what `propertyNames` says with `properties` or `patternProperties`."""
    result = {name: value for name, value in schema.items() if name != "propertyNames"}
    names = resolved(schema["propertyNames"], root)
    if names is True or (isinstance(names, dict) and not _limits(names)):
        return result
    if (
        not isinstance(names, dict)
        or not _is_well_formed(names)
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
        result["properties"] = {name: inner if matches(pattern, name) else False for name, inner in own.items()}
    more = {} if other is False else {"patternProperties": {pattern: other}}
    return result | more | {"additionalProperties": False}


def _limits(names: Schema) -> set[str]:
    """Return the keywords that limit a string."""
    return names.keys() & {"enum", "const", "pattern", "minLength", "maxLength", "format", *_PLACES}


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
    for keyword in _DEPENDENT:
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
        narrowed = _with_tags(schema, branches, root)
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


def _with_tags(schema: Schema, branches: list[Any], root: Schema) -> list[Any] | None:
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
