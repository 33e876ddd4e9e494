"""What a form may be: whatever is contradictory, too large or no text is refused as it is made."""

import json
from typing import Any

import msgspec
import pytest

from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.structured_output import (
    MAX_CHOICES,
    MAX_SCHEMA_DEPTH,
    MAX_SPEC_BYTES,
    MAX_TAGS,
    StructuralTag,
    StructuredOutput,
)

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
TAG = StructuralTag(begin="<tool_call>\n{", json_schema=SCHEMA, end="}</tool_call>", trigger="<tool_call>")
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": '{"type": "integer"}'},
    {"json_object": True},
    {"regex": "[a-z]+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
    {"tags": [TAG], "min_tags": 1, "max_tags": 2},
    {"tags": [TAG], "free_text": False, "separator": "\n"},
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("fields", FORMS)
def test_a_form_survives_the_way_to_the_core(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_output=StructuredOutput(**fields))
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert there == params
    assert hash(there.structured_output) == hash(params.structured_output)
    assert params.structured_output is not None
    assert params.structured_output.kind == next(iter(fields))


def test_a_schema_is_stored_as_text_in_its_own_order() -> None:
    text = StructuredOutput(json_schema=SCHEMA).json_schema
    assert isinstance(text, str)
    assert list(json.loads(text)["properties"]) == ["z", "a"]
    assert StructuredOutput(json_schema=json.dumps(SCHEMA, indent=2)).json_schema == text


def test_the_largest_that_fits() -> None:
    StructuredOutput(json_schema=nested(MAX_SCHEMA_DEPTH))
    StructuredOutput(regex="x" * MAX_SPEC_BYTES)
    StructuredOutput(choice=["x"] * MAX_CHOICES)


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({}, "structured_output", "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "structured_output", "exactly one"),
        ({"json_object": 1}, "json_object", "true or false"),
        ({"regex": ""}, "regex", "empty"),
        ({"regex": 5}, "regex", "string"),
        ({"regex": "\ud800"}, "regex", "surrogate"),
        ({"regex": "é" * (MAX_SPEC_BYTES // 2 + 1)}, "regex", "bytes"),
        ({"grammar": "x" * (MAX_SPEC_BYTES + 1)}, "grammar", "bytes"),
        ({"choice": "yes"}, "choice", "list"),
        ({"choice": ["yes", ""]}, "choice", "empty"),
        ({"choice": [1]}, "choice", "string"),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "choice", "at most"),
        ({"choice": ["x" * MAX_SPEC_BYTES, "x"]}, "choice", "bytes"),
        ({"json_schema": "{"}, "json_schema", "line 1, column 2"),
        ({"json_schema": "[]"}, "json_schema", "object"),
        ({"json_schema": {"a": float("nan")}}, "json_schema", "not JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema", "not JSON"),
        ({"json_schema": "x" * 10_000_000}, "json_schema", "bytes"),
        ({"json_schema": {"enum": ["x" * MAX_SPEC_BYTES]}}, "json_schema", "bytes"),
        ({"json_schema": nested(MAX_SCHEMA_DEPTH + 1)}, "json_schema", "levels"),
        ({"json_schema": '{"a":' * 50_000 + "1" + "}" * 50_000}, "json_schema", "levels"),
        ({"tags": [5]}, "tags", "StructuralTag"),
        ({"tags": [TAG] * (MAX_TAGS + 1)}, "tags", "at most"),
        ({"tags": [TAG], "min_tags": -1}, "min_tags", "at least 0"),
        ({"tags": [TAG], "min_tags": 2, "max_tags": 1}, "max_tags", "at least 2"),
        ({"tags": [TAG], "max_tags": 0}, "max_tags", "at least 1"),
        ({"tags": [TAG], "free_text": None}, "free_text", "true or false"),
        ({"tags": [TAG], "separator": ","}, "separator", "free_text=False"),
        ({"tags": [StructuralTag(grammar="start: /a/")]}, "tags.begin", "empty"),
        ({"regex": "a", "min_tags": 1}, "min_tags, max_tags, free_text", "requires tags"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidParameterError, match=limit) as caught:
        StructuredOutput(**fields)
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"begin": "<a>"}, "tags"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "tags"),
        ({"begin": 5, "json_schema": {}}, "tags.begin"),
        ({"begin": "<a>", "json_schema": {}, "trigger": "a"}, "tags.trigger"),
        ({"begin": "<a>", "json_schema": []}, "tags.json_schema"),
    ],
)
def test_tags_that_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        StructuralTag(**fields)
    assert caught.value.field == field


def test_a_tag_is_triggered_by_all_of_its_beginning_unless_told() -> None:
    assert StructuralTag(begin="<a>", json_schema={}).trigger == "<a>"
    assert TAG.trigger == "<tool_call>"


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidParameterError, match="structured_output"):
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]
