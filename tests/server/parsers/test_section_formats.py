# ruff: noqa: RUF001  (the models write such bars)
"""Calls in sections, of DeepSeek and Kimi, and in GLM's tags, by example."""

import json

import pytest
from tests.server.parsers.support import make, parse_all, parse_pieces, parsed

from octavo.server.openai.parsers.deepseek import DeepSeekParser, DeepSeekV3Parser
from octavo.server.openai.parsers.glm import GlmParser
from octavo.server.openai.parsers.kimi import KimiParser
from octavo.server.openai.parsers.tool_calls import ToolCallParser
from octavo.structured.grammar_text import grammar_text
from octavo.structured_output import StructuredOutput

B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CB, CE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ARGS = '{"a": "two\\nlines", "b": 12}'
Calls = list[tuple[str, str]]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Hi.{B}{CB}f{SEP}{ARGS}{CE}{E}", "Hi.", [("f", ARGS)]),
        (f'{B}{CB}f{SEP}{{"a":\n1}}{CE}{CB}g{SEP}{{}}{CE}{E}', "", [("f", '{"a":\n1}'), ("g", "{}")]),
        (f"{CB}f{SEP}{{}}{CE} then", " then", [("f", "{}")]),  # without a section
        (f"{B}{CB}f{SEP}{CE}{E}", "", [("f", "{}")]),
        (f"{B}\n{CB} f {SEP} {{}} {CE}\n{E}", "", [("f", "{}")]),
        (f"{B}{CB}function{SEP}f\n```json\n{ARGS}\n```{CE}\n{CB}function{SEP}g\n```json\n{{}}\n```{CE}{E}", "",
         [("f", ARGS), ("g", "{}")]),
        (f"{B}{CB}other{SEP}{{}}{CE}{E}", f"{B}{CB}other{SEP}{{}}{CE}{E}", []),
        (f"{B}{CB}f{SEP}3{CE}", f"{B}{CB}f{SEP}3{CE}", []),
        (f'{CB}f{SEP}{{"a": ]}}{CE}{E} x', " x", [("f", '{"a": ]}')]),
        (f"{CB}f{SEP}{{}}{CE}{CB}other{SEP}{{}}{CE}", f"{CB}other{SEP}{{}}{CE}", [("f", "{}")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [DeepSeekParser, DeepSeekV3Parser])
def test_deepseek(kind: type[ToolCallParser], text: str, content: str, calls: Calls) -> None:
    assert parsed(kind, text) == (content, calls)


def kimi(*calls: tuple[str, str]) -> str:
    each = [f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{text}<|tool_call_end|>" for header, text in calls]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"So.{kimi(('functions.f:0', ARGS), ('functions.g:1', '{}'))}", "So.",
         [("functions.f:0", "f", ARGS), ("functions.g:1", "g", "{}")]),
        (kimi(("functions.f:17", " {} ")), "", [("functions.f:17", "f", "{}")]),
        (kimi(("functions.f:0", "{}"), ("functions.f:0", "{}")), "",
         [("functions.f:0", "f", "{}"), ("functions.f:1", "f", "{}")]),
        (kimi(("f", "{}"), ("g:4", "{}")), "", [("functions.f:0", "f", "{}"), ("functions.g:0", "g", "{}")]),
        (kimi(("functions.other:0", "{}")), kimi(("functions.other:0", "{}")), []),
        ("<|tool_call_begin|>\nfunctions.f:0\n<|tool_call_argument_begin|>\n{}\n<|tool_call_end|>", "",
         [("functions.f:0", "f", "{}")]),
    ],
)  # fmt: skip
def test_kimi(text: str, content: str, calls: list[tuple[str, str, str]]) -> None:
    message = parse_all(make(KimiParser), text)
    assert parse_pieces(make(KimiParser), list(text)) == message
    assert message.content == content
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "Well.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1 < 2\n</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>12</arg_value>\n</tool_call>",
            "Well.",
            [("f", '{"a": "1 < 2\\n", "b": 12}')],
        ),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>12</arg_value></tool_call>", "", [("f", '{"a": "12"}')]),
        ('<tool_call>f<arg_key>c</arg_key><arg_value>[1, {"x": null}]</arg_value></tool_call>', "",
         [("f", '{"c": [1, {"x": null}]}')]),
        ("<tool_call>g</tool_call><tool_call>get_weather\n</tool_call>", "", [("g", "{}"), ("get_weather", "{}")]),
        ("<tool_call>g", "", [("g", "{}")]),
        ("<tool_call>g<arg_key>a</arg_key>", "<arg_key>a</arg_key>", [("g", "{}")]),
        ("<tool_call>other</tool_call>", "<tool_call>other</tool_call>", []),
        ("<tool_call>g is a tool", "<tool_call>g is a tool", []),
    ],
)  # fmt: skip
def test_glm(text: str, content: str, calls: Calls) -> None:
    assert parsed(GlmParser, text) == (content, calls)


def test_without_arguments_a_call_is_seen_at_its_end_tag() -> None:
    parser = make(GlmParser)
    assert not parser.push("<tool_call>g</tool_call")
    assert len(parser.push(">")) == 3  # the start, and both brackets
    assert json.loads(parse_all(make(GlmParser), "<tool_call>g</tool_call>").tool_calls[0].arguments) == {}


@pytest.mark.parametrize("kind", [DeepSeekParser, DeepSeekV3Parser, KimiParser, GlmParser])
def test_where_the_model_has_tokens_for_marks_the_grammar_asks_for_those(kind: type[ToolCallParser]) -> None:
    """Also within a call: text that only reads like a mark is not what the model was trained to write."""
    tokens = {mark: number for number, mark in enumerate(kind.markers, start=100)}
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    for tags in (kind.tags(schemas), kind.loose_tags(schemas)):
        assert tags is not None
        text = grammar_text(StructuredOutput(tags=tags, free_text=False, max_tags=1), tokens)
        assert not any(
            json.dumps(mark, ensure_ascii=False)[1:-1] in json.loads(text)["grammars"][0]["lark_grammar"]
            for mark in tokens
        )
        assert not any(mark in each.get("lark_grammar", "") for mark in tokens for each in json.loads(text)["grammars"])
        assert "[lazy]" not in text.replace("head", "")
