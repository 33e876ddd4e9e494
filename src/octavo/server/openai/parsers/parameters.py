"""The parameters of a tool one by one, for grammars of formats that do not write them as one JSON object."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.structured.schema import compiler_schema

_REMARKS = frozenset({"title", "description", "default", "examples", "$comment", "$schema"})
_UNDERSTOOD = _REMARKS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_PLAIN_STRING = _REMARKS | {"type", "enum", "const"}
MAX_OPTIONAL = 64  # grammars with commas grow with the square of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter; `schema` stands for itself, with all definitions that it may refer to."""

    name: str
    schema: Mapping[str, object]
    is_required: bool

    @property
    def is_string(self) -> bool:
        """Whether formats without quotes write it as it stands."""
        return self.schema.get("type") == "string"

    @property
    def strings(self) -> list[str] | None:
        """The strings that it may be; empty when it may be any, None when that cannot be told."""
        if not self.is_string or set(self.schema) - _PLAIN_STRING - {"$defs", "definitions"}:
            return None
        values = self.schema.get("enum", [])
        if "const" in self.schema:
            values = [self.schema["const"]]
        return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None

    @property
    def json_grammar(self) -> str:
        """Grammar of its value as JSON."""
        return f"%json {compiler_schema(json.dumps(self.schema))}"


def parameters_of(schema: Mapping[str, object]) -> list[Parameter] | None:
    """Return the parameters of a tool, those that must be given first; None if they depend on one another."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if set(schema) - _UNDERSTOOD or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if not all(isinstance(each, dict) for each in properties.values()):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    parameters = [
        Parameter(name=name, schema={**shared, **each}, is_required=name in required)
        for name, each in properties.items()
    ]
    if sum(not parameter.is_required for parameter in parameters) > MAX_OPTIONAL:
        return None
    return sorted(parameters, key=lambda parameter: not parameter.is_required)


def quoted(text: str) -> str:
    """Return text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
