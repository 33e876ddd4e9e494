"""Stop strings end an answer's content; reasoning and calls are passed over, wherever the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.parsers.support import ParsedMessage, cut, cut_places, make, parse_all

from octavo.server.openai.answer_plan import TOOL_CALL_PARSERS
from octavo.server.openai.parsers.base import OutputParser
from octavo.server.openai.parsers.wrappers import Chain, ContentStops, ReasoningParser, SpecialTokenFilter


def parser(name: str = "hermes") -> OutputParser:
    thoughts = ReasoningParser("<think>", "</think>", starts_inside=False)
    return Chain(SpecialTokenFilter(["<|x|>"]), Chain(thoughts, make(TOOL_CALL_PARSERS[name])))


def stopped(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The text that is passed on, and the stop string."""
    finder, shown = ContentStops(parser(), stop, include), ""
    for piece in pieces:
        text, found = finder.push(piece)
        shown += text
        if found is not None:
            return shown, found
    text, found = finder.finish(is_cut=False, may_stop=True)
    return shown + text, found


CALL = '<tool_call>{"name": "f", "arguments": {"a": "end"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("<think>the end</think>It is.", "It is.", None),
        ("<think>the end</think>It is the end, yes", "It is the ", "end"),
        (f"I call. {CALL} This is the end.", "I call. This is the ", "end"),  # the space belongs to the call
        (CALL, "", None),
        (f"This is the end. {CALL}", "This is the ", "end"),
        ("<think>x</think>the e<|x|>nd is", "the ", "end"),
        ("en", "en", None),
    ],
)
def test_only_content_is_searched(text: str, content: str, found: str | None) -> None:
    for pieces in ([text], list(text), [text[:-1], text[-1:]]):
        shown, stop = stopped(pieces, ["end"])
        message = parse_all(parser(), shown)
        if "<|x|>" not in text:
            assert message.content.rstrip() == content.rstrip()
        assert stop == found
        assert bool(message.tool_calls) is (text.startswith((CALL, "I call.")))


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", " ", "\n", "a", "b", "<", "<|x|>", CALL, "<tool_call>"]), max_size=12
    ),
    st.lists(st.sampled_from(["a", "ab", "ba", "\n", "<", "end"]), min_size=1, max_size=2),
    st.booleans(),
    cut_places,
)
def test_cuts_and_withheld_text_never_show(parts: list[str], stop: list[str], include: bool, places: list[int]) -> None:
    text = "".join(parts)
    shown, found = stopped(cut(text, places), stop, include=include)
    assert text.startswith(shown)
    if found is None:
        assert shown == text
        return
    assert shown == stopped(list(text), stop, include=include)[0]
    whole = parse_all(parser(), text)
    message: ParsedMessage = parse_all(parser(), shown)
    assert whole.reasoning.startswith(message.reasoning)
    if not whole.tool_calls and "<|x|>" not in text:
        expected = min((place for each in stop if (place := whole.content.find(each)) >= 0), default=-1)
        assert expected >= 0
