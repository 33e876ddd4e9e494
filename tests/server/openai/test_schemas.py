"""Which objects of a request's schemas are closed."""

from typing import Any

import pytest

from octavo.server.openai.tools import closed, closed_arguments

NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**NAMED, "additionalProperties": False}
BARE = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({"properties": {"b": NAMED}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": NAMED}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        (NAMED | {"additionalProperties": NAMED}, NAMED | {"additionalProperties": CLOSED}),
        (  # Rust's flattened enums: a branch allows what the object names around it
            NAMED | {"oneOf": [{"properties": {"b": NAMED}, "required": ["a", "b"]}]},
            NAMED
            | {
                "oneOf": [
                    {"properties": {"a": True, "b": CLOSED}, "required": ["a", "b"], "additionalProperties": False}
                ]
            },
        ),
    ],
)
def test_objects_that_name_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema, strict=False) == closed(schema, strict=True) == expected


@pytest.mark.parametrize(
    "schema",
    [
        NAMED | {"additionalProperties": True},
        NAMED | {"patternProperties": {"^x": {}}},
        NAMED | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},  # who names `b`?
        NAMED | {"required": ["b"]},
        NAMED | {"minProperties": 2},
        {"allOf": [NAMED, NAMED]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}], "$defs": {"x": NAMED}},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": NAMED}},
        NAMED | {"oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": NAMED}},
        NAMED | {"anyOf": [NAMED], "oneOf": [NAMED]},
        {"properties": 3, "required": "no"},  # reported by others
    ],
)
def test_what_says_otherwise_or_is_described_elsewhere_stays(schema: dict[str, Any]) -> None:
    assert closed(schema, strict=True) == schema


def test_objects_without_properties_are_closed_in_strict_mode_only() -> None:
    schema = {"type": ["object", "null"], "description": "anything"}
    assert closed(schema, strict=False) == schema
    assert closed(schema, strict=True) == schema | {"additionalProperties": False}


@pytest.mark.parametrize("schema", [{}, BARE, BARE | {"properties": {}}])
def test_a_tool_without_properties_takes_nothing(schema: dict[str, Any]) -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert closed_arguments(schema, strict=False) == nothing
    assert closed_arguments(schema | {"additionalProperties": True}, strict=True)["additionalProperties"] is True
