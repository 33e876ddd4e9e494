"""Keywords that the grammar library lacks, as generators write them: each with values that match and that do not."""

import json
from typing import Any

import pytest
from tests.structured.support import backend_of, tokenizer_of

from octavo.errors import InvalidParameterError
from octavo.structured.checker import check_structured_output
from octavo.structured_output import StructuredOutput

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # of Zod
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"  # of pydantic, whose limits follow
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{"ab": 1}, {}],
        [{"A": 1}, {"a": "x"}],
    ),
    "zod record": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        [{"A b": 1.5}],
        [{"a": "x"}],
    ),
    "zod record enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
            "required": ["a", "b"],
        },
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "propNames minmax": (
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 5}},
        [{"abc": 1}],
        [{"": 1}, {"abcdef": 1}],
    ),
    "propNames format": (
        {"type": "object", "propertyNames": {"type": "string", "format": "uuid"}, "additionalProperties": {}},
        [{"123e4567-e89b-12d3-a456-426614174000": 1}],
        [{"a": 1}],
    ),
    "propNames+props": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"pattern": "^[a-z]$"}},
        [{"a": 1}, {"b": "x"}],
        [{"a": "x"}, {"ab": 1}],
    ),
    "oneOf nullable ref": (
        {"$defs": {"A": {"type": "object"}}, "oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        [None, {"x": 1}],
        [1],
    ),
    "oneOf objs": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        [{"a": "x"}, {"b": "x"}],
        [{"a": "x", "b": "y"}, {}],
    ),
    "int64": (
        {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
        [5, -5, 4611686018427387904],
        [1.5],
    ),
    "number64": ({"type": "number", "minimum": -9223372036854775808, "maximum": 9223372036854775807}, [5, -5.5], []),
    "float": ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, [1.5], []),
    "double": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [1.5, 1e300],
        [],
    ),
    "not {}": ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "string"}}}, [{"b": "x"}], [{"a": 1}]),
    "not type": ({"not": {"type": "string"}}, [1, None, 1.5, True, [], {}], ["x"]),
    "zod never": (
        {"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False},
        [{}],
        [{"a": 1}],
    ),
    "ap not": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"not": {}}},
        [{"a": "x"}],
        [{"b": 1}],
    ),
    "anyOf not": ({"anyOf": [{"type": "string"}, {"not": {}}]}, ["x"], [1]),
    "items not": ({"type": "array", "items": {"not": {}}}, [[]], [[1]]),
    "unevaluated": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedProperties": False},
        [{"a": "x"}],
        [{"b": 1}],
    ),
    "unevaluated allOf": (
        {
            "allOf": [{"type": "object", "properties": {"a": {"type": "string"}}}],
            "properties": {"b": {"type": "string"}},
            "unevaluatedProperties": False,
        },
        [{"a": "x", "b": "y"}],
        [{"c": 1}, {"a": 1}],
    ),
    "unevalItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": False},
        [["x"], []],
        [["x", 1]],
    ),
    "depReq": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "dependentRequired": {"a": ["b"]},
        },
        [{"b": "x"}, {}, {"a": "x", "b": "y"}],
        [{"a": "x"}],
    ),
    "depSch": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "dependentSchemas": {"a": {"required": ["b"]}},
        },
        [{"b": "x"}, {}, {"a": "x", "b": "y"}],
        [{"a": "x"}],
    ),
    "dependencies": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "dependencies": {"a": ["b"]},
        },
        [{"b": "x"}, {}],
        [{"a": "x"}],
    ),
    "minProps named": (
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "minProperties": 1},
        [{"a": "x"}, {"b": "x"}],
        [{}],
    ),
    "zod email": (
        {
            "type": "string",
            "format": "email",
            "pattern": EMAIL,
        },
        ["a.b@c.de"],
        ["a..b@c.de", ".a@c.de"],
    ),
    "ifconst": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"properties": {"v": {"type": "integer"}}, "required": ["v"]},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "x", "v": 1}, {"k": "y", "v": "s"}, {"k": "y"}],
        [{"k": "x"}, {"k": "x", "v": "s"}, {"k": "y", "v": 1}],
    ),
    "proto oneof": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "integer"}},
            "additionalProperties": False,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": "x"}, {"b": 1, "c": 2}],
        [{}, {"c": 1}, {"a": "x", "b": 1}],
    ),
    "oneOf ref overlap": (
        {
            "$defs": {
                "A": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                "B": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            },
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        },
        [{"a": "x"}, {"b": "x"}],
        [{"a": "x", "b": "y"}, {}],
    ),
    "oneOf enum refs": (
        {
            "$defs": {"A": {"enum": ["a", "b"]}, "B": {"enum": ["c"]}, "N": {"type": "integer"}},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"$ref": "#/$defs/N"}],
        },
        ["a", "c", 5],
        ["d", None],
    ),
    "dec": (
        {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"},
        ["1", "-0.5", ".5", "1."],
        ["-", ".", ""],
    ),
    "zod duration": (
        {"type": "string", "pattern": DURATION},
        ["P1Y2M3DT4H5M6.5S", "P3W", "PT1S", "P1DT1M"],
        ["P", "PT", "P1YT", "P1W1D"],
    ),
    "decimal both": (
        {"type": "string", "pattern": DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
        ["123.45", "-0.5", ".5", "0", "007"],
        ["-", ".", "1234", "1.234"],
    ),
    "decimal digits": (
        {"type": "string", "pattern": DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"},
        ["123", "1.23", ".123", "12.3"],
        ["1234", "12.34", "."],
    ),
    "decimal places": (
        {"type": "string", "pattern": DECIMAL + r"\d*\.?\d{0,2}0*$"},
        ["12345.67", ".5"],
        [".", "1.234"],
    ),
    "pydantic union of tags with defaults": (
        {
            "$defs": {
                "A": {"properties": {"k": {"const": "a", "default": "a"}, "x": {"type": "integer"}}, "type": "object"},
                "B": {"properties": {"k": {"const": "b", "default": "b"}}, "type": "object"},
            },
            "discriminator": {"propertyName": "k"},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        },
        [{"k": "a", "x": 1}, {"k": "b"}],
        [{}, {"x": 1}, {"k": "c"}],
    ),
    "openapi discriminator": (
        {
            "components": {
                "schemas": {name: {"type": "object", "properties": {"t": {"type": "string"}}} for name in ("A", "B")}
            },
            "oneOf": [{"$ref": "#/components/schemas/A"}, {"$ref": "#/components/schemas/B"}],
            "discriminator": {"propertyName": "t", "mapping": {"first": "#/components/schemas/A"}},
        },
        [{"t": "first"}, {"t": "B"}],
        [{"t": "A"}, {}],
    ),
    "proto oneof of none": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "oneOf": [
                {"required": ["a"]},
                {"required": ["b"]},
                {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
            ],
        },
        [{}, {"a": "x"}, {"b": 1}],
        [{"a": "x", "b": 1}],
    ),
    "oneOf of ranges": (
        {"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "exclusiveMinimum": 0}, {"enum": [True]}]},
        [-1, 0, 1, True],
        [0.5],
    ),
    "oneOf value and range": ({"oneOf": [{"enum": [-1]}, {"type": "integer", "minimum": 0}]}, [-1, 3], [-2]),
    "oneOf of lengths": (
        {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 3}]},
        ["a", "abc"],
        ["ab"],
    ),
    "oneOf of formats": (
        {"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "date"}]},
        ["1.2.3.4", "2024-01-01"],
        ["x"],
    ),
    "not set": (
        {"type": "object", "required": None, "properties": {"a": {"type": "string", "enum": None, "format": None}}},
        [{}, {"a": "x"}],
        [{"a": None}],
    ),
    "one item is unique": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
}

# What cannot be kept: the place, and what to do.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": (
        {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
        r"at \$.properties.a: oneOf: .*anyOf",
    ),
    "keyword": ({"items": {"uniqueItems": True}}, r'at \$.items: unsupported keywords: "uniqueItems"; leave them out'),
    "names": ({"patternProperties": {"a": {}}, "propertyNames": {"pattern": "b"}}, "propertyNames"),
    "itself": ({"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}, r"at .*a.*oneOf: its"),
    "type": ({"properties": {"a": {"type": "int"}}}, r"at \$.properties.a: Invalid type: int; one of array, boolean, "),
    "nothing": ({"not": {}}, "schema is false"),
}


def matches(schema: dict[str, Any], value: object) -> bool:
    matcher = backend_of("byte_level").compile(StructuredOutput(json_schema=schema)).matcher
    token_ids = tokenizer_of("byte_level")[0].encode(json.dumps(value), add_special_tokens=False)
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_keeps_its_meaning(name: str) -> None:
    schema, fitting, others = CASES[name]
    check_structured_output(StructuredOutput(json_schema=schema))
    assert [value for value in fitting if not matches(schema, value)] == []
    assert [value for value in others if matches(schema, value)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_keyword_without_its_meaning_is_refused(name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(InvalidParameterError, match=words) as caught:
        check_structured_output(StructuredOutput(json_schema=schema))
    assert "coerce_one_of" not in str(caught.value)
