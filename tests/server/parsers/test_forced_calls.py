"""Grammars from tools: what they say, and that what they allow is read back as the calls that were meant."""

import json

import pytest
from tests.server.parsers.support import make

from octavo.server.openai.parsers.base import ParsedCall, parse_all
from octavo.server.openai.parsers.call_limit import CallLimit
from octavo.server.openai.parsers.forced_calls import call_or_answer, forced_parser, may_call, must_call
from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.registry import TOOL_CALL_PARSERS

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "get_weather": {}}
FORCED = sorted({forced_parser(kind) for kind in TOOL_CALL_PARSERS.values()}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
def test_every_format_has_one_that_can_be_forced(name: str) -> None:
    kind = TOOL_CALL_PARSERS[name]
    assert forced_parser(kind) is (HermesParser if name in ("pythonic", "qwen3_coder") else kind)


@pytest.mark.parametrize("kind", FORCED)
def test_what_a_grammar_writes_is_read_as_calls(kind: type[HermesParser]) -> None:
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
