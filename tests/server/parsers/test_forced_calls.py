"""Grammars from tools: what they say, and that what they allow is read back as the calls that were meant."""

import json
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.breadth import RUNS_ALL, pick
from tests.server.parsers.support import ParsedMessage, parse_all

from octavo.demo import demo_model_path
from octavo.server.openai.answer_plan import TOOL_CALL_PARSERS
from octavo.server.openai.parsers.deepseek import DeepSeekParser
from octavo.server.openai.parsers.gemma4 import QUOTE, Gemma4Parser
from octavo.server.openai.parsers.glm import GlmParser
from octavo.server.openai.parsers.json_calls import HermesParser
from octavo.server.openai.parsers.minimax import MiniMaxParser
from octavo.server.openai.parsers.pythonic import PythonicParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.tool_calls import Schemas, ToolCallParser
from octavo.server.openai.tools import ToolUse
from octavo.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_output import StructuredOutput
from octavo.tokenizer.tokenizer import Tokenizer

STOP = 2
BACKEND = LLGuidanceBackend(
    (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"),
    num_tokens=2048,
    vocab_size=2048,
    added_tokens={"<|im_end|>": STOP, "<tool_call>": 5, "</tool_call>": 6},
    end_token_ids=[STOP],
)
TOKENIZER = Tokenizer.from_path(demo_model_path())
STRING_END = TOKENIZER.encode('"')
TEXT_ENDS = {
    Gemma4Parser: QUOTE,
    GlmParser: "</arg_value>",
    MiniMaxParser: "</parameter>\n",
    Qwen3CoderParser: "\n</parameter>\n",
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    "get_weather": {},
}
RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "colour": {"type": "string", "enum": ["red", 'a "b"\n']},
        "number": {"$ref": "#/$defs/small"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "maybe": {"type": ["boolean", "null"]},
    },
    "required": ["number", "colour"],
    "additionalProperties": False,
    "$defs": {"small": {"enum": [1, -2.5]}},
}
# The same without what only JSON can tell.
NATIVE = {**RICH["properties"], "number": {"enum": [1, -2.5]}, "words": {"type": "array", "items": {"const": "one"}}}
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[ab]"}}, "required": ["a"]}
EITHER = {"anyOf": [SCHEMAS["f"], PATTERN]}


def use(
    kind: type[ToolCallParser], schemas: Schemas, *, strict: Collection[str] = (), parallel: bool = True
) -> ToolUse:
    """The tools of a request, for a model of this format."""
    return ToolUse(
        prompt_tools=[],
        schemas=schemas,
        strict=frozenset(strict),
        grammars={},
        is_required=False,
        is_subset=True,
        is_parallel=parallel,
        own_parser=kind,
    )


def must_call(kind: type[ToolCallParser], schemas: Schemas, *, parallel: bool) -> StructuredOutput:
    constraint = replace(use(kind, schemas, parallel=parallel), is_required=True).constraint(None)
    assert constraint is not None
    return constraint


def check_rich(arguments: Mapping[str, Any]) -> None:
    assert {"number", "colour"} <= set(arguments) <= set(RICH["properties"])
    assert arguments["number"] in (1, -2.5)
    assert arguments["colour"] in ("red", 'a "b"\n')
    assert isinstance(arguments.get("text", ""), str)
    assert arguments.get("maybe") in (True, False, None)
    words = arguments.get("words", [])
    assert len(words) <= 2
    assert all(isinstance(word, str) and len(word) <= 3 for word in words)


def draw(constraint: StructuredOutput, parser: ToolCallParser, seed: int) -> ParsedMessage:
    """What `parser` reads in an answer by a model that knows nothing but the mask."""
    matcher = BACKEND.compile(constraint)
    rng, words = random.Random(seed), np.zeros((1, BACKEND.num_words), dtype=np.int32)  # [1, W]
    text_end = TOKENIZER.encode(TEXT_ENDS.get(type(parser), '"'), add_special_tokens=False)
    tokens: list[int] = []
    spelling: list[int] = []  # what a model that is tired of a long text writes next
    while not matcher.is_complete and tokens[-1:] != [STOP]:
        assert BACKEND.fill_masks([matcher], words) == [None]
        allowed = [token for token in range(2048) if words[0, token // 32] >> token % 32 & 1]
        if not spelling and len(tokens) > 100:
            ways = ([STOP] if len(tokens) > 600 else text_end, text_end, STRING_END)  # a call may take hundreds
            spelling = list(next((way for way in ways if way[0] in allowed), STRING_END))
        if spelling and spelling[0] in allowed:
            token, *spelling = spelling
        else:
            token, spelling = rng.choice(allowed), []
        matcher.accept(token)
        tokens.append(token)
        assert len(tokens) < 2000
    text = TOKENIZER.decode(tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
    return parse_all(parser, text)


@pytest.mark.parametrize("kind", TOOL_CALL_PARSERS.values())
@pytest.mark.parametrize("seed", range(pick(3, 8)))
def test_whatever_the_mask_allows_is_calls_with_arguments_as_the_schema_has_them(
    kind: type[ToolCallParser], seed: int
) -> None:
    schemas = {"f": RICH, "get_weather": {}}
    assert use(kind, schemas).forced_parser is kind
    message = draw(must_call(kind, schemas, parallel=False), kind(schemas), seed)
    assert message.content == ""
    (call,) = message.tool_calls
    if call.name == "f":
        check_rich(json.loads(call.arguments))
    else:
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {})


SEVERAL = [kind for kind in TOOL_CALL_PARSERS.values() if not kind.calls_once]
if not RUNS_ALL:  # the demo model has no tokens for DeepSeek's marks; Kimi's calls stand in sections, too
    SEVERAL = [kind for kind in SEVERAL if not issubclass(kind, DeepSeekParser)]


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_calls_in_a_row(kind: type[ToolCallParser]) -> None:
    messages = [draw(must_call(kind, SCHEMAS, parallel=True), kind(SCHEMAS), seed) for seed in range(8)]
    assert max(len(message.tool_calls) for message in messages) > 1
    for message in messages:
        assert message.content == ""
        for call in message.tool_calls:
            assert list(json.loads(call.arguments)) == (["a"] if call.name == "f" else [])


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args", "qwen3_coder"])
def test_a_marker_in_free_text_leaves_only_offered_names(name: str) -> None:
    """The mask of an answer that has begun a call: tool names come next, whatever the model would write."""
    kind = TOOL_CALL_PARSERS[name]
    constraint = use(kind, SCHEMAS).constraint(None)
    assert constraint is not None
    matcher, words = BACKEND.compile(constraint), np.zeros((1, BACKEND.num_words), dtype=np.int32)
    (trigger,) = {tag.trigger for tag in constraint.tags}
    opening = {"hermes": '\n{"name": "', "mistral": '[{"name": "', "mistral_args": "", "qwen3_coder": "\n<function="}
    for token in TOKENIZER.encode(f"Hello {trigger}{opening[name]}", add_special_tokens=False):
        matcher.accept(token)
    assert BACKEND.fill_masks([matcher], words) == [None]
    allowed = [TOKENIZER.token_text(token) for token in range(2048) if words[0, token // 32] >> token % 32 & 1]
    assert allowed
    assert all(text[:1] in ("f", "g", " ") or text[:1] == '"' for text in allowed), allowed


@pytest.mark.parametrize("kind", [PythonicParser, Qwen3CoderParser])
def test_formats_that_cannot_tell_a_schema_are_forced_as_hermes(kind: type[ToolCallParser]) -> None:
    schemas = {"f": EITHER}
    assert use(kind, schemas).forced_parser is HermesParser
    assert use(kind, schemas, strict={"f"}).constraint(None) is None
    (call,) = draw(must_call(kind, schemas, parallel=False), HermesParser(schemas), 1).tool_calls
    assert "a" in json.loads(call.arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": True}},
        {"required": "a"},
        {"required": [{}]},
        {"required": ["a"]},
        {"properties": {"a-b": {"type": "string", "format": "date"}}},
        {"properties": {"if": {"type": "string", "enum": [1]}}},
        {"properties": {"<>": {"type": "string", "enum": "x"}, "a.b": {}}},
        {"properties": {f"a{index}": {"type": "string", "minLength": 1} for index in range(65)}},
        {"minProperties": 1},
    ],
)
def test_schemas_that_cannot_be_told(schema: dict[str, Any]) -> None:
    assert use(PythonicParser, {"f": schema}).forced_parser is HermesParser
    assert use(Qwen3CoderParser, {"f": schema}).forced_parser is HermesParser


def test_a_pattern_needs_quotes_around_it() -> None:
    assert use(PythonicParser, {"f": PATTERN}).forced_parser is PythonicParser
    assert use(Qwen3CoderParser, {"f": PATTERN}).forced_parser is HermesParser


@pytest.mark.parametrize("seed", range(pick(2, 8)))
def test_gemma_has_a_notation_of_its_own(seed: int) -> None:
    schemas = {"f": {**RICH, "properties": NATIVE}}
    assert Gemma4Parser.tag("f", schemas["f"]).grammar is not None
    message = draw(must_call(Gemma4Parser, schemas, parallel=False), Gemma4Parser(schemas), seed)
    assert message.content == ""
    arguments = json.loads(message.tool_calls[0].arguments)
    assert set(arguments.pop("words", [])) <= {"one"}  # as many as there may be
    check_rich(arguments)


def test_required_calls_leave_no_room_for_text() -> None:
    constraint = must_call(HermesParser, SCHEMAS, parallel=True)
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags, constraint.separator) == (
        False,
        1,
        None,
        "\n",
    )
    assert must_call(HermesParser, SCHEMAS, parallel=False).max_tags == 1


def test_no_parameters_are_an_empty_object() -> None:
    assert json.loads(str(must_call(HermesParser, SCHEMAS, parallel=True).tags[1].json_schema)) == {
        "type": "object", "properties": {}, "additionalProperties": False,
    }  # fmt: skip


def test_among_text_only_strict_tools_are_held_to_their_schemas() -> None:
    constraint = use(HermesParser, SCHEMAS, strict={"f"}, parallel=False).constraint(None)
    assert constraint is not None
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags) == (True, 0, 1)
    assert [json.loads(str(tag.json_schema)) for tag in constraint.tags] == [SCHEMAS["f"], {"type": "object"}]
    assert {tag.trigger for tag in constraint.tags} == {"<tool_call>"}


def test_an_answer_in_json_may_stand_in_place_of_a_call() -> None:
    constraint = use(HermesParser, SCHEMAS).constraint(StructuredOutput(json_schema='{"type":"array"}'))
    assert constraint is not None
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags) == (False, 1, 1)
    assert (constraint.tags[-1].begin, constraint.tags[-1].json_schema, constraint.tags[-1].end) == (
        "",
        '{"type":"array"}',
        "",
    )


def test_calls_beyond_the_limit_are_left_out() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = parse_all(HermesParser(SCHEMAS, max_calls=1), f"Two:\n{call}\n{call}\nDone")
    assert len(message.tool_calls) == 1
    assert message.content == "Two:\nDone"
