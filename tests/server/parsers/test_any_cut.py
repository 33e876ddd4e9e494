# ruff: noqa: RUF001  (the models write such bars)
"""However a text is cut, every format gives the same; and what holds no call comes out as it went in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.parsers.support import cut, cut_places, make, parse_all, parse_pieces

from octavo.server.openai.answer_plan import TOOL_CALL_PARSERS
from octavo.server.openai.parsers.base import Content
from octavo.server.openai.parsers.tool_calls import ToolCallParser
from octavo.server.openai.parsers.wrappers import Chain, ReasoningParser, SpecialTokenFilter

PARTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": "}\\""}', "}", "<t", '{"x', "é\n"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": ', '{"a": 1}', "};", '{"name": "Bo"}', "<|", " x"],
    "mistral": ["[TOOL_CALLS]", "[", '{"name": "f", "arguments": {"a": 1}}', ",", "]", "f[ARGS]", '{"a": [2]}', " é"],
    "pythonic": ["<|python_start|>", "[", "f(", "a=1", "c='x)\\''", "b=[1, {'k': None}]", ", ", ")", "]", '"""', "é"],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "<parameter=b>", "\n",
        'x"<', "12", "</parameter>",
    ],
    "glm": [
        "<tool_call>", "</tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>", 'x"<', "</arg_value>", "\n",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", '{"a": 1}', "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>", "function", "\n```json\n", "\n```", " é",
    ],
    "gemma4": [
        "<|tool_call>", "call:", "f", "{", "a:", '<|"|>', 'x}"', "b=12", ",", "[", "]", "}", "<tool_call|>", "1.", " é",
    ],
    "harmony": [
        "<|start|>assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.f", "<|constrain|>json",
        "<|message|>", '{"a": 1}', "<|end|>", "<|call|>", " é", "??",
    ],
    "kimi": [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
        '{"a": 1}', "<|tool_call_end|>", "<|tool_calls_section_end|>", "f", " é",
    ],
    "phi4": ["<|tool_call|>", "[", '{"name": "f", "arguments": ', '{"a": 1}', "}", ",", "]", "<|/tool_call|>", " é"],
    "cohere": [
        "<|START_ACTION|>", "[", '{"tool_name": "f", "parameters": ', '{"a": 1}', "}", "]", "<|END_ACTION|>", "é",
    ],
    "minimax_m2": [
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="a">',
        '<parameter name="b">', "\n", 'x"<', "12", "</parameter>",
    ],
    "olmo3": ["<function_calls>", "</function_calls>", "f(", "a=1", "c='x)\\''", ", ", ")", "\n", "é"],
}  # fmt: skip
formats = st.sampled_from(sorted(PARTS))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(min_size=1, max_size=4), values, max_size=3)


@st.composite
def odd_texts(draw: st.DrawFn) -> tuple[type[ToolCallParser], str]:
    """A format, and a text of parts of it in any order: calls now and then, mostly mistakes."""
    name = draw(formats)
    return TOOL_CALL_PARSERS[name], "".join(draw(st.lists(st.sampled_from(PARTS[name]), max_size=14)))


@given(odd_texts(), cut_places)
def test_cuts_never_show(case: tuple[type[ToolCallParser], str], places: list[int]) -> None:
    kind, text = case
    assert parse_pieces(make(kind), cut(text, places)) == parse_all(make(kind), text)


@given(odd_texts())
def test_without_a_call_nothing_is_lost(case: tuple[type[ToolCallParser], str]) -> None:
    kind, text = case
    message = parse_all(make(kind), text)
    if not message.tool_calls and not kind.answer_begin:  # headers are no text
        assert message.content == text


CALLS = {
    "hermes": 'Hi <b>. <tool_call>\n{"name": "f", "arguments": {"a": "<x>"}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": "<x>"}}; {"name": "g", "parameters": {}}',
    "mistral": 'Hi <b>.[TOOL_CALLS] [{"name": "f", "arguments": {"a": "<x>"}}, {"name": "g", "arguments": {}}]',
    "mistral_args": 'Hi <b>.[TOOL_CALLS]f[ARGS]{"a": "<x>"}[TOOL_CALLS]g[ARGS]{}',
    "pythonic": "<|python_start|>[f(a='<x>'), g()]<|python_end|>",
    "qwen3_coder": "Hi <b>. <tool_call>\n<function=f>\n<parameter=a>\n<x>\n</parameter>\n</function>\n</tool_call>",
    "glm": "Hi <b>. <tool_call>f\n<arg_key>a</arg_key>\n<arg_value><x></arg_value>\n</tool_call>",
    "deepseek_v3": "Hi <b>. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "<x>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "Hi <b>. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": "<x>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": 'Hi <b>. <|tool_call>call:f{a:<|"|><x><|"|>}<tool_call|>',
    "harmony": "<|channel|>commentary<|message|>Hi <b>.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": "<x>"}<|call|>',
    "kimi": "Hi <b>. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "<x>"}<|tool_call_end|><|tool_calls_section_end|>',
    "granite": 'Hi <b>. <|tool_call|>[{"name": "f", "arguments": {"a": "<x>"}}, {"name": "g", "arguments": {}}]',
    "phi4": 'Hi <b>. <|tool_call|>[{"name": "f", "arguments": {"a": "<x>"}}]<|/tool_call|>',
    "hunyuan_a13b": 'Hi <b>. <tool_calls>[{"name": "f", "arguments": {"a": "<x>"}}]</tool_calls>',
    "cohere": 'Hi <b>. <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "<x>"}}]'
    "<|END_ACTION|>",
    "minimax_m2": 'Hi <b>. <minimax:tool_call>\n<invoke name="f">\n<parameter name="a"><x></parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "olmo3": "Hi <b>. <function_calls>f(a='<x>')\ng()</function_calls>",
}


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
def test_a_call_cut_by_the_length_limit_leaves_no_markup(name: str) -> None:
    """Wherever it is cut: content is text before the calls, and of the call there is all that is known."""
    for size in range(1, len(CALLS[name])):
        text = CALLS[name][:size]
        content = parse_all(make(TOOL_CALL_PARSERS[name]), text, is_cut=True).content
        assert "Hi <b>.".startswith(content.removesuffix("<").removesuffix("[").rstrip()), text
    whole = parse_all(make(TOOL_CALL_PARSERS[name]), CALLS[name][:-1], is_cut=True)
    assert json.loads(whole.tool_calls[0].arguments) == {"a": "<x>"}


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "argu', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]", ""),
        ("pythonic", "[f(a='x", ""),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</para", '{"a": "x'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg", '{"a": "x'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", ""),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a"', '{"a"'),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", ""),
    ],
)
def test_what_is_known_of_a_cut_call_is_a_partial_call(name: str, text: str, arguments: str) -> None:
    message = parse_all(make(TOOL_CALL_PARSERS[name]), text, is_cut=True)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", arguments)]
    assert message.content == ""


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
def test_calls_of_other_tools_are_text(name: str) -> None:
    kind = TOOL_CALL_PARSERS[name]
    assert parse_all(kind({"other": {}}), CALLS[name]).tool_calls == []


@given(odd_texts())
def test_calls_count_from_zero_and_ids_differ(case: tuple[type[ToolCallParser], str]) -> None:
    kind, text = case
    calls = parse_all(kind({"f": {}}), text).tool_calls
    assert len({call.id for call in calls}) == len(calls)


@given(st.sampled_from(["hermes", "llama3_json", "mistral"]), st.lists(objects, min_size=1, max_size=3), cut_places)
def test_any_arguments_come_back(name: str, arguments: list[dict[str, object]], places: list[int]) -> None:
    texts = [json.dumps(each, ensure_ascii=False) for each in arguments]
    joined = {
        "hermes": "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in texts),
        "llama3_json": "; ".join(f'{{"name": "f", "parameters": {text}}}' for text in texts),
        "mistral": "[TOOL_CALLS] [" + ", ".join(f'{{"name": "f", "arguments": {text}}}' for text in texts) + "]",
    }[name]
    message = parse_pieces(make(TOOL_CALL_PARSERS[name]), cut(joined, places))
    assert message.content == ""
    assert [call.arguments for call in message.tool_calls] == texts


@given(
    st.lists(st.dictionaries(st.from_regex("[a-z]{1,3}_", fullmatch=True), values, max_size=3), min_size=1, max_size=3)
)
def test_any_python_arguments_come_back(arguments: list[dict[str, object]]) -> None:
    calls = ["f(" + ", ".join(f"{key}={value!r}" for key, value in each.items()) + ")" for each in arguments]
    message = parse_all(make(TOOL_CALL_PARSERS["pythonic"]), f"[{', '.join(calls)}]")
    assert [json.loads(call.arguments) for call in message.tool_calls] == arguments


@given(st.text(st.characters(codec="utf-8")).filter(lambda code: "</parameter>" not in code), cut_places)
def test_any_code_comes_back_without_escapes(code: str, places: list[int]) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{code}\n</parameter>\n</function>\n</tool_call>"
    message = parse_pieces(make(TOOL_CALL_PARSERS["qwen3_coder"]), cut(text, places))
    assert json.loads(message.tool_calls[0].arguments) == {"a": code}


@given(st.text(st.characters(codec="utf-8")).filter(lambda code: "</arg_value>" not in code), cut_places)
def test_any_text_comes_back_verbatim(text: str, places: list[int]) -> None:
    whole = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    message = parse_pieces(make(TOOL_CALL_PARSERS["glm"]), cut(whole, places))
    assert json.loads(message.tool_calls[0].arguments) == {"a": text}


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
@given(text=st.text("ab <[\n", max_size=30))
def test_only_a_possible_mark_is_held_back(name: str, text: str) -> None:
    kind = TOOL_CALL_PARSERS[name]
    parser = make(kind)
    shown = sum(len(delta.text) for delta in parser.push("x") if isinstance(delta, Content))
    for size, character in enumerate(text, start=1):
        shown += sum(len(delta.text) for delta in parser.push(character) if isinstance(delta, Content))
        held = ("x" + text[:size])[shown:].lstrip()
        assert not held or any(mark.startswith(held) for mark in kind.markers)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", "a ", "<|x|>", "<|x|>y", "<tool_call>"]), max_size=12),
    st.booleans(),
    cut_places,
)
def test_cuts_never_show_in_a_chain(parts: list[str], starts_inside: bool, places: list[int]) -> None:
    def chain() -> Chain:
        thoughts = ReasoningParser("<think>", "</think>", starts_inside=starts_inside)
        return Chain(SpecialTokenFilter(["<|x|>", "<|x|>y"]), Chain(thoughts, make(TOOL_CALL_PARSERS["hermes"])))

    text = "".join(parts)
    assert parse_pieces(chain(), cut(text, places)) == parse_all(chain(), text)
