"""JSON schemas as grammars in Lark for Gemma 4's notation of arguments: bare keys, strings between delimiters.

Numbers and constants are those of JSON. None stands for what the notation, or this translation, cannot tell: patterns
and lengths of strings, counts, references, unions of schemas.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.openai.parsers.pythonic import list_of
from octavo.server.openai.parsers.tool_calls import REMARKS, json_rule, parameters_of, quoted

_JSON_TYPES = frozenset({"integer", "number", "boolean", "null"})  # written as in JSON
_SAYS_NOTHING = REMARKS | {"$defs", "definitions"}  # which only matter to references
_PLAIN_KEY = re.compile(r"[^:={}\[\](),<>\"\n\s]+")
_MAX_DEPTH = 8  # of lists and objects


def argument_rules(schema: Mapping[str, object], quote: str) -> str | None:
    """Return the rules of what stands between the braces of a call, with `quote` around strings."""
    rules: list[str] = []
    start = _members(schema, rules, quote, 0)
    if start is None:
        return None
    return "\n".join([f"start: {start}", *rules, rf"text[lazy]: /(.|\n)*/ {quoted(quote)}"])


def _members(schema: Mapping[str, Any], rules: list[str], quote: str, depth: int) -> str | None:
    """Return the expression of an object without its braces; rules that it uses are added to `rules`."""
    parameters = parameters_of(schema)
    if parameters is None or depth > _MAX_DEPTH or schema.get("additionalProperties") is True:
        return None
    names = []
    for parameter in parameters:
        value = _value(parameter.schema, rules, quote, depth + 1)
        if value is None or not _PLAIN_KEY.fullmatch(parameter.name):
            return None
        names.append(f"a{len(rules)}")
        rules.append(f"{names[-1]}: {quoted(f'{parameter.name}:')} {value}")
    return list_of(names, sum(parameter.is_required for parameter in parameters), ",")


def _value(schema: Any, rules: list[str], quote: str, depth: int) -> str | None:
    """Return the expression of any value that a schema allows."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        is_plain = set(schema) - _SAYS_NOTHING <= {"type", "enum", "const"} and isinstance(values, list)
        return _either([_literal(value, quote) for value in values]) if is_plain else None
    if not isinstance(types, list) or not types:
        return None
    return _either([_of_type(str(each), schema, rules, quote, depth) for each in types])


def _of_type(name: str, schema: Mapping[str, Any], rules: list[str], quote: str, depth: int) -> str | None:
    """Return the expression of the values of one type."""
    said = set(schema) - _SAYS_NOTHING
    if name in _JSON_TYPES:
        return json_rule({**schema, "type": name})
    if name == "string":
        return f"{quoted(quote)} text" if said == {"type"} else None
    if name == "array":
        item = _value(schema.get("items"), rules, quote, depth + 1) if said == {"type", "items"} else None
        return None if item is None else f'"[" ({item} ("," {item})*)? "]"'
    members = _members({**schema, "type": "object"}, rules, quote, depth) if schema.get("properties") else None
    return None if members is None else f'"{{" {members} "}}"'


def _literal(value: object, quote: str) -> str | None:
    if isinstance(value, str):
        return None if quote in value else f"{quoted(quote)} {quoted(value) if value else ''} {quoted(quote)}"
    return None if isinstance(value, (list, dict)) else json_rule({"const": value})


def _either(expressions: Sequence[str | None]) -> str | None:
    known = [each for each in expressions if each is not None]
    return f"({' | '.join(known)})" if known and len(known) == len(expressions) else None
