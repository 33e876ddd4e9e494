"""The demo model's tokenizer and template: nothing is unknown, digits stand alone, messages come out marked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.demo_model.calls import SKILLS, call
from tools.demo_model.template import TEMPLATE_PATH, render

from octavo.demo import demo_model_path
from octavo.tokenizer.chat_template import ChatTemplate

TOKENIZER = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
USER = {"role": "user", "content": "Hi"}


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token() -> None:
    assert TOKENIZER.encode("123").tokens == ["1", "2", "3"]


@pytest.mark.parametrize("mark", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</think>"])
def test_marks_are_single_tokens(mark: str) -> None:
    assert TOKENIZER.encode(mark).tokens == [mark]


def test_decoding_drops_ends_and_keeps_marks_that_parsers_need() -> None:
    ids = TOKENIZER.encode("<tool_call>x</tool_call><|im_end|>").ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_prompt_ends_where_the_model_begins() -> None:
    assert render([USER], is_prompt=True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render([USER], is_prompt=True, is_thinking=True).endswith("assistant\n<think>\n")


def test_the_engine_renders_what_was_trained() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER, call(SKILLS[0], {"city": "Oslo"})]
    tools = [skill.schema() for skill in SKILLS[:2]]
    engine = ChatTemplate(TEMPLATE_PATH.read_text())
    assert engine.render(messages, tools=tools) == render(messages, tools, is_prompt=True)
    thinking = engine.render([USER], enable_thinking=True)
    assert thinking == render([USER], is_prompt=True, is_thinking=True)


def test_a_call_reads_the_same_as_text_and_as_structure() -> None:
    text = call(SKILLS[0], {"city": "Oslo"})
    function = {"name": SKILLS[0].name, "arguments": {"city": "Oslo"}}
    structured = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert render([USER, text], is_prompt=False) == render([USER, structured], is_prompt=False)


def test_results_of_two_tools_share_one_turn() -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = render([USER, *results], is_prompt=False)
    assert text.count("<|im_start|>") == 2
    assert "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>" in text


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="wizard"):
        render([USER, {"role": "wizard", "content": "x"}], is_prompt=False)
