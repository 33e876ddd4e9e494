"""Grammars from tools: what they say, and that what they allow is read back as the calls that were meant."""

import json
import random

import numpy as np
import pytest
from tests.server.parsers.support import make

from octavo.demo import demo_model_path
from octavo.server.openai.parsers.base import ParsedCall, parse_all
from octavo.server.openai.parsers.call_limit import CallLimit
from octavo.server.openai.parsers.forced_calls import call_or_answer, forced_parser, may_call, must_call
from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.registry import TOOL_CALL_PARSERS
from octavo.server.openai.parsers.tool_calls import ToolCallParser
from octavo.structured.llguidance_backend import LLGuidanceBackend
from octavo.tokenizer.tokenizer import Tokenizer

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "get_weather": {}}
FORCED = sorted({forced_parser(kind) for kind in TOOL_CALL_PARSERS.values()}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
def test_every_format_has_one_that_can_be_forced(name: str) -> None:
    kind = TOOL_CALL_PARSERS[name]
    assert forced_parser(kind) is (HermesParser if name in ("pythonic", "qwen3_coder") else kind)


@pytest.mark.parametrize("kind", FORCED)
def test_what_a_grammar_writes_is_read_as_calls(kind: type[ToolCallParser]) -> None:
    form = must_call(kind, SCHEMAS, parallel=True)
    text = form.separator.join(
        f"{tag.begin}{arguments}{tag.end}" for tag, arguments in zip(form.tags, ('{"a":1}', "{}"), strict=True)
    )
    message = parse_all(make(kind), text)
    assert message.content == ""
    assert message.tool_calls == [ParsedCall("0", "f", '{"a":1}'), ParsedCall("1", "get_weather", "{}")]


def test_required_calls_leave_no_room_for_text() -> None:
    form = must_call(HermesParser, SCHEMAS, parallel=True)
    assert (form.free_text, form.min_tags, form.max_tags, form.separator) == (False, 1, None, "\n")
    assert must_call(HermesParser, SCHEMAS, parallel=False).max_tags == 1


def test_no_parameters_are_an_empty_object() -> None:
    assert json.loads(str(must_call(HermesParser, SCHEMAS, parallel=True).tags[1].json_schema)) == {
        "type": "object", "properties": {}, "additionalProperties": False,
    }  # fmt: skip


def test_among_text_only_strict_tools_are_held_to_their_schemas() -> None:
    form = may_call(HermesParser, SCHEMAS, {"f"}, parallel=False)
    assert (form.free_text, form.min_tags, form.max_tags) == (True, 0, 1)
    assert [json.loads(str(tag.json_schema)) for tag in form.tags] == [SCHEMAS["f"], {"type": "object"}]
    assert {tag.trigger for tag in form.tags} == {"<tool_call>"}


def test_an_answer_in_json_may_stand_in_place_of_a_call() -> None:
    form = call_or_answer(HermesParser, SCHEMAS, '{"type":"array"}')
    assert (form.free_text, form.min_tags, form.max_tags) == (False, 1, 1)
    assert (form.tags[-1].begin, form.tags[-1].json_schema, form.tags[-1].end) == ("", '{"type":"array"}', "")


def test_calls_beyond_the_limit_are_left_out() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = parse_all(CallLimit(make(HermesParser), 1), f"Two:\n{call}\n{call}\nDone")
    assert len(message.tool_calls) == 1
    assert message.content == "Two:\nDone"


BACKEND = LLGuidanceBackend(
    (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"),
    num_tokens=2048,
    vocab_size=2048,
    added_tokens={"<|im_end|>": 2, "<tool_call>": 5, "</tool_call>": 6},
    end_token_ids=[2],
)
TOKENIZER = Tokenizer.from_path(demo_model_path())


@pytest.mark.parametrize("kind", FORCED)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_mask_allows_is_calls_with_arguments_as_the_schema_has_them(
    kind: type[ToolCallParser], seed: int
) -> None:
    schemas = {"f": {**SCHEMAS["f"], "additionalProperties": False}, "get_weather": {}}
    matcher = BACKEND.compile(must_call(kind, schemas, parallel=True)).matcher()
    rng, words = random.Random(seed), np.zeros((1, BACKEND.num_words), dtype=np.int32)
    tokens: list[int] = []
    while not matcher.is_complete and tokens[-1:] != [2]:
        assert BACKEND.fill_masks([matcher], words) == [None]
        allowed = [token for token in range(2048) if words[0, token // 32] >> token % 32 & 1]
        ends = allowed == [2] or (2 in allowed and rng.random() < 0.3)
        tokens.append(2 if ends else rng.choice([token for token in allowed if token != 2]))
        matcher.accept(tokens[-1])
    text = TOKENIZER.decode(tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
    message = parse_all(kind(schemas), text)
    assert message.content == ""
    assert message.tool_calls
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        assert list(arguments) == (["a"] if call.name == "f" else [])
        assert all(isinstance(value, int) for value in arguments.values())
