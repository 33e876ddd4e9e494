"""Gemma 4's calls and thoughts by example, with the mistakes that models make; and schemas in its notation."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.parsers.support import cut, cut_places, make, parse_all, parse_pieces, parsed

from octavo.server.openai.answer_plan import REASONING_FORMATS
from octavo.server.openai.parsers.base import ToolCallArguments
from octavo.server.openai.parsers.gemma4 import QUOTE, Gemma4Parser
from octavo.server.openai.parsers.wrappers import ReasoningParser
from octavo.structured.grammar_text import grammar_text
from octavo.structured_output import StructuredOutput

B, E, Q = "<|tool_call>", "<tool_call|>", QUOTE


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n{B}call:f{{a:{Q}x{Q},b:42,c:{{k:true,l:[1.5,null]}}}}{E}", "Well.",
         ['{"a": "x", "b": 42, "c": {"k": true, "l": [1.5, null]}}']),
        (f'{B}call:f{{a:{Q}}}"]{{\n\\{Q}}}{E}', "", ['{"a": "}\\"]{\\n\\\\"}']),
        (f"{B}call:f{{}}{E}{B}call:f{{a:{Q}{Q}}}{E}", "", ["{}", '{"a": ""}']),
        (f"call:f{{b:1}}{E} ok", " ok", ['{"b": 1}']),  # as after a thought
        (f"{B}:f{{b:1}}{E}", "", ['{"b": 1}']),
        (f"{B}f{{b:1}}{E}", "", ['{"b": 1}']),
        (f"{B}call:f(a={Q}x{Q}, b=-1.)", "", ['{"a": "x", "b": -1.0}']),
        (f'{B}call:f{{{Q}a{Q}:"x\\n", "b" : .5}}{E}', "", ['{"a": "x\\n", "b": 0.5}']),
        (f"{B}call:f{{a:Bern , c:[True,None,NaN,007]}}{E}", "", ['{"a": "Bern", "c": [true, null, "NaN", "007"]}']),
        (f"{B} call:f {{ b : 1 ,\n}} {E}", "", ['{"b": 1}']),
        (f"{B}call:f{{a:{Q}x", "", ['{"a": "x"}']),  # the model has ended, so it is closed
        (f"{B}call:f{{a:", "", ["{}"]),
        (f"{B}call:f{{c:[1,{{k", "", ['{"c": [1, {}]}']),
        (f"{B}call:f{{b:1,?}}{E}", f"?}}{E}", ['{"b": 1}']),
        (f"{B}call:f{{c:{'[' * 99}", "[" * 35, ['{"c": ' + "[" * 64 + "]" * 64 + "}"]),
        (f"{B}call:other{{}}{E}", f"{B}call:other{{}}{E}", []),
        (f"{B}f is", f"{B}f is", []),
        ("f(x) is", "f(x) is", []),
        ("call: f{", "call: f{", []),
    ],
)  # fmt: skip
def test_calls(text: str, content: str, calls: list[str]) -> None:
    assert parsed(Gemma4Parser, text) == (content, [("f", each) for each in calls])
    for each in calls:
        json.loads(each)


def test_arguments_stream_as_they_come() -> None:
    parser = make(Gemma4Parser)
    assert parser.push(f"{B}call:f{{a:{Q}one ")[1:] == [
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, '"a": "'),
        ToolCallArguments(0, "one "),
    ]
    assert parser.push("two<") == [ToolCallArguments(0, "two")]


@pytest.mark.parametrize(
    ("end", "text"), [("1", '{"b": '), ("1.", '{"b": '), ("1,", '{"b": 1'), ("1.5}", '{"b": 1.5}')]
)
def test_numbers_wait_for_their_end(end: str, text: str) -> None:
    deltas = make(Gemma4Parser).push(f"{B}call:f{{b:{end}")
    shown = "".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments))
    assert shown == (text if text != '{"b": ' else "{")


def notation(value: Any) -> str:
    """How Gemma writes a value."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{notation(inner)}" for key, inner in value.items()) + "}"
    return f"[{','.join(map(notation, value))}]" if isinstance(value, list) else json.dumps(value)


texts = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda text: Q not in f"{text}{Q}"[:-1])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z_]{1,4}", fullmatch=True), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex("[a-z_]{1,4}", fullmatch=True), values, max_size=3), cut_places)
def test_any_arguments_come_back(arguments: dict[str, Any], places: list[int]) -> None:
    text = f"{B}call:f{notation(arguments)}{E}"
    message = parse_pieces(make(Gemma4Parser), cut(text, places))
    assert message.content == ""
    assert json.loads(message.tool_calls[0].arguments) == arguments


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nSo.\n<channel|>Yes.", "So.", "Yes."),
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),  # as large models write with thinking off
        ("<|channel>So.<channel|>Yes.", "So.", "Yes."),
        ("Yes.", "", "Yes."),
    ],
)
def test_thoughts(text: str, reasoning: str, content: str) -> None:
    tags = REASONING_FORMATS["gemma4"]
    for pieces in ([text], list(text)):
        parser = ReasoningParser(tags.begin, tags.end, starts_inside=False, label=tags.label)
        message = parse_pieces(parser, pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_where_an_answer_starts() -> None:
    tags = REASONING_FORMATS["gemma4"]
    ends = ["<|turn>model\n", "<|turn>model\n<|channel>thought\n", "<|turn>model\n<|channel>thought\n<channel|>"]
    assert [tags.starts_inside(end) for end in ends] == [False, True, None]


NATIVE = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"], "minimum": 0},
        "c": {"type": "array", "items": {"enum": ["x", 1]}},
        "d": {"type": "object", "properties": {"e": {"type": ["string", "boolean"]}}, "required": ["e"]},
    },
    "required": ["a"],
}


def test_a_grammar_has_bare_keys_and_tokens_around_strings() -> None:
    tag = Gemma4Parser.tag("f", NATIVE)
    assert tag.begin == f"{B}call:f{{"
    tokens = {mark: number for number, mark in enumerate(Gemma4Parser.markers, start=100)}
    text = grammar_text(StructuredOutput(tags=[tag], free_text=False, max_tags=1), tokens)
    rules = json.loads(text)["grammars"][1]["lark_grammar"]
    assert Q not in rules.replace("\\", "")
    assert '"a:" (<[102]> text)' in rules
    assert r"text: /(.|\n)*/ <[102]>" in rules


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 1}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}},
        {"properties": {"a b": {"type": "string"}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"enum": [[1]]}}},
    ],
)
def test_what_cannot_be_told_so_is_told_as_json(schema: dict[str, Any]) -> None:
    tag = Gemma4Parser.tag("f", {"type": "object", **schema})
    assert (tag.begin, tag.end, tag.grammar) == (f"{B}call:f", E, None)
    message = parse_all(make(Gemma4Parser), f'{B}call:f{{"a b": ["x"], "c": {{}}}}{E}')
    assert json.loads(message.tool_calls[0].arguments) == {"a b": ["x"], "c": {}}
