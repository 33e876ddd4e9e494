"""Reasoning apart from answers, and special tokens out of both."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.parsers.support import cut, cut_places, make, parse_all, parse_pieces

from octavo.server.openai.answer_plan import REASONING_FORMATS
from octavo.server.openai.parsers.base import Content, OutputParser, Reasoning
from octavo.server.openai.parsers.json_calls import HermesParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.wrappers import Chain, ReasoningParser, SpecialTokenFilter


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\nHm.\n\nSo.\n</think>\n\nYes. ", True, "Hm.\n\nSo.", "Yes. "),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm. </thi", True, "Hm. </thi", ""),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        (" Yes", False, "", " Yes"),
        ("<thi", False, "", "<thi"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_answer(text: str, starts_inside: bool, reasoning: str, content: str) -> None:
    message = parse_all(ReasoningParser("<think>", "</think>", starts_inside=starts_inside), text)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_thoughts_stream_as_they_come() -> None:
    parser = ReasoningParser("<think>", "</think>", starts_inside=False)
    assert [list(parser.push(piece)) for piece in ("<th", "ink>", "One", ", two. ", "</", "think>", "\n", "Yes")] == [
        [], [], [Reasoning("One")], [Reasoning(", two.")], [], [], [], [Content("Yes")],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("think", "<|im_start|>assistant\n", "Hi", "", "Hi"),
        ("think", "<|im_start|>assistant\n<think>\n", "Hm</think>Hi", "Hm", "Hi"),
        ("think", "what is <think>?\n", "Hi", "", "Hi"),
        ("deepseek_r1", "<|Assistant|>", "Hm</think>Hi", "Hm", "Hi"),
        ("mistral", "[/INST]", "[THINK]Hm[/THINK]Hi", "Hm", "Hi"),
    ],
)
def test_the_prompt_may_open_the_thoughts(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    starts_inside = REASONING_FORMATS[name].starts_inside(prompt)
    assert starts_inside is not None
    tags = REASONING_FORMATS[name]
    message = parse_all(ReasoningParser(tags.begin, tags.end, starts_inside=starts_inside), text)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize("name", ["think", "qwen3", "deepseek_r1"])
def test_a_prompt_that_closes_the_thoughts_asks_for_none(name: str) -> None:
    assert REASONING_FORMATS[name].starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None


def test_calls_are_looked_for_behind_the_thoughts_only() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    chain = Chain(ReasoningParser("<think>", "</think>", starts_inside=True), make(HermesParser))
    message = parse_all(chain, f"I may write {call}.\n</think>\n\n{call}")
    assert message.reasoning == f"I may write {call}."
    assert message.content == ""
    assert [each.name for each in message.tool_calls] == ["f"]


@given(st.text("<|ab>[ "), cut_places, st.lists(st.sampled_from(["<|a|>", "<|a|>b", "[b]", "|>"]), unique=True))
def test_hidden_tokens_are_gone_whatever_the_cuts(text: str, places: Sequence[int], hidden: list[str]) -> None:
    expected, rest = "", text
    while rest:
        token = max((token for token in hidden if rest.startswith(token)), key=len, default="")
        expected, rest = (expected, rest[len(token) :]) if token else (expected + rest[0], rest[1:])
    assert parse_pieces(SpecialTokenFilter(hidden), cut(text, places)).content == expected


def test_text_without_marks_passes_at_once() -> None:
    assert SpecialTokenFilter(["<|a|>"]).push("text") == [Content("text")]
    assert OutputParser().push("text") == [Content("text")]
    assert not [*OutputParser().push(""), *OutputParser().finish()]


@pytest.mark.parametrize(
    ("begun", "inside"),
    [
        ("<think>\nThis is", True),
        (" <think>", True),
        ("<think>x</think>", None),
        ("x</think>\nSo", None),
        ("So", False),
        ("The tag <think> is", False),
    ],
)
def test_an_answer_that_was_begun(begun: str, inside: bool | None) -> None:
    assert REASONING_FORMATS["think"].continues_inside(begun) is inside


def test_a_continued_thought_keeps_its_white_space() -> None:
    text = " a\n\ntest.\n</think>\n\nYes."
    for pieces in ([text], list(text)):
        parser = ReasoningParser("<think>", "</think>", starts_inside=True, is_continued=True)
        message = parse_pieces(parser, pieces)
        assert (message.reasoning, message.content) == (" a\n\ntest.", "Yes.")


CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"I call.\n{CALL}", "I call.", CALL),
        (f"I call <tool_call>.\n</think>\n\n{CALL}", "I call <tool_call>.", CALL),
        ("So.</think>\n</think>\n\nYes.", "So.", "Yes."),
        ("So.</think>Yes. </think>", "So.", "Yes. </think>"),
    ],
)
def test_a_call_ends_a_thought_that_the_model_forgot_to_end(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        calls = Qwen3CoderParser.openings({"f": {}})
        parser = ReasoningParser("<think>", "</think>", starts_inside=True, calls=calls)
        message = parse_pieces(parser, pieces)
        assert (message.reasoning, message.content) == (reasoning, content)
