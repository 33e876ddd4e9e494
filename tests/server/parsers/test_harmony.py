"""gpt-oss's format by example, with its mistakes; constrained answers in it; and earlier answers in the prompt."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.server.parsers.support import SCHEMAS, ParsedMessage, parse_all, parse_pieces

from octavo.demo import demo_model_path
from octavo.sampling_params import SamplingParams
from octavo.server.openai.answer_plan import AnswerFormats, AnswerPlan
from octavo.server.openai.chat_prompt import BegunAnswer
from octavo.server.openai.parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonyParser
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_output import StructuredOutput
from octavo.tokenizer.tokenizer import Tokenizer

ARGS = '{"a": "x\\ny"}'
THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm.{END}{START}assistant"
ANSWER = f"{CHANNEL}final{MESSAGE}"
Case = tuple[str, str, str, list[tuple[str, str]]]

GOOD: list[Case] = [
    (f"{THOUGHT}{ANSWER}Yes. {RETURN}", "Hm.", "Yes. ", []),
    (f"{ANSWER}Yes.", "", "Yes.", []),
    (f"{THOUGHT}{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{ARGS}{CALL}", "Hm.", "", [("f", ARGS)]),
    (f"{THOUGHT} to=functions.f{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{ARGS}{CALL}", "Hm.", "", [("f", ARGS)]),
    (f"{THOUGHT}{CHANNEL}commentary to=functions.f{MESSAGE}{ARGS}", "Hm.", "", [("f", ARGS)]),
    (f"{THOUGHT}{CHANNEL}analysis to=functions.f code{MESSAGE}{ARGS}{CALL}", "Hm.", "", [("f", ARGS)]),
    (f"{CHANNEL}commentary{MESSAGE}I look.{END}{START}assistant{CHANNEL}commentary to=functions.g{MESSAGE}{{}}{CALL}",
     "", "I look.", [("g", "{}")]),
    (f'{CHANNEL}final {CONSTRAIN}json{MESSAGE}{{"a": 1}}{RETURN}', "", '{"a": 1}', []),
    (f"{THOUGHT}{CHANNEL}analysis{MESSAGE}Or.{END}{START}assistant{ANSWER}A", "Hm.\n\nOr.", "A", []),
    (f"{CHANNEL}commentary{MESSAGE}A{END}{START}assistant{ANSWER}B", "", "A\n\nB", []),
]  # fmt: skip
ODD: list[Case] = [
    ("Hello <b>", "", "Hello <b>", []),  # no header at all
    (f"{CHANNEL}analysis??{MESSAGE}Hm.{END}{ANSWER}A", "Hm.", "A", []),
    (f"{CHANNEL}analysis{CHANNEL}final{MESSAGE}A", "", "A", []),
    (f"{CHANNEL}final final words {RETURN}", "", "words ", []),
    (f"{CHANNEL}analysis I think{END}{START}assistant{ANSWER}A", "I think", "A", []),
    (f"{CHANNEL}thoughts{MESSAGE}A", "", "A", []),
    (f"{START}assistant{ANSWER}A", "", "A", []),
    (f"{MESSAGE}A{END}B", "", "A\n\nB", []),
    (f"{ANSWER}A{MESSAGE}B{CONSTRAIN}C", "", "ABC", []),
    (f"{ANSWER}{CHANNEL}final{MESSAGE}A", "", "A", []),
    (f"{CHANNEL}commentary to=functions.other{MESSAGE}{{}}{CALL}", "", "{}", []),
    (f"{CHANNEL}analysis to=python code{MESSAGE}1 + 1{CALL}", "1 + 1", "", []),
    (f"{CHANNEL}commentary to=f{MESSAGE}{ARGS}", "", "", [("f", ARGS)]),
    (f"{CHANNEL}commentary to=functions.f{MESSAGE}{CALL}", "", "", [("f", "{}")]),
    (f"{CHANNEL}commentary to=functions.f{MESSAGE}", "", "", [("f", "{}")]),
    (f"{CHANNEL}commentary to=functions.f{MESSAGE} {ARGS} \n{CALL}", "", "", [("f", ARGS)]),
    (f"{CHANNEL}commentary to=functions.f{MESSAGE}{ARGS} so{CALL}", "", "so", [("f", ARGS)]),
    (f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": ]}}{CALL}', "", "", [("f", '{"a": ]}')]),
    (f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{ARGS}{CALL}", "", "", [("f", ARGS)]),
    (f"{CHANNEL}final {'wide ' * 100}", "", "wide " * 100, []),
    (f"{CHANNEL}final", "", "", []),
    ("  ", "", "  ", []),
    ("to=functions are", "", "to=functions are", []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), [*GOOD, *ODD])
def test_answers(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse_all(HarmonyParser(SCHEMAS, lambda: bytes(12)), text)
    assert parse_pieces(HarmonyParser(SCHEMAS, lambda: bytes(12)), list(text)) == whole
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in whole.tool_calls] == calls


@pytest.mark.parametrize("size", range(len(GOOD[2][0])))
def test_an_answer_that_is_cut_shows_no_markup(size: int) -> None:
    message = parse_all(HarmonyParser(SCHEMAS), GOOD[2][0][:size], is_cut=True)
    assert message.content in ("", "<")  # which is rather text than a part of a mark
    assert message.reasoning in ("", "H", "Hm", "Hm.", "Hm.<")
    assert [call.name for call in message.tool_calls] in ([], ["f"])


@pytest.mark.parametrize(("inside", "reasoning", "content"), [(True, "Hm.", "A"), (None, "", "Hm.\n\nA")])
def test_an_answer_may_start_within_a_message(inside: bool | None, reasoning: str, content: str) -> None:
    message = parse_all(HarmonyParser({}, starts_inside=inside), f"Hm.{END}{START}assistant{ANSWER}A")
    assert (message.reasoning, message.content) == (reasoning, content)


TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == "assistant" and "tool_calls" in m %}
{%- if m.content and m.thinking %}{{ raise_exception("either a thought or text") }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.content or m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- "<|return|>" if loop.last else "<|end|>" }}
{%- elif m.role == "tool" %}<|start|>functions to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with the format's tokens."""
    path = tmp_path_factory.mktemp("harmony")
    config = json.loads((demo_model_path() / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["additional_special_tokens"] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN]
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    shutil.copy(demo_model_path() / "tokenizer.json", path)
    return path


@pytest.fixture(scope="module")
def formats(folder: Path) -> AnswerFormats:
    return AnswerFormats(Tokenizer.from_path(folder))


def plan(formats: AnswerFormats, params: SamplingParams | None = None, **fields: Any) -> AnswerPlan:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    request = msgspec.json.decode(json.dumps(body), type=ChatCompletionRequest)
    prompt = formats.tokenizer.encode(f"{START}user{MESSAGE}Hi{END}{START}assistant", add_special_tokens=False)
    return AnswerPlan.of(request, params or SamplingParams(), formats).after(prompt)


@cache
def backend(tokenizer: Tokenizer) -> LLGuidanceBackend:
    added = {token.content: id_ for id_, token in tokenizer.files.backend.get_added_tokens_decoder().items()}
    size = max(tokenizer.files.backend.get_vocab().values()) + 1
    ends = tokenizer.files.end_token_ids((), size)
    assert {added[RETURN], added[CALL]} <= set(ends)
    return LLGuidanceBackend(
        tokenizer.files.backend.to_str(), num_tokens=size, vocab_size=size, added_tokens=added, end_token_ids=ends
    )


def drawn(formats: AnswerFormats, made: AnswerPlan, seed: int, head: str = "") -> ParsedMessage:
    """What is read in an answer that begins with `head`, by a model that knows nothing but the mask."""
    tokenizer = formats.tokenizer
    grammars = backend(tokenizer)
    assert made.params.structured_output is not None
    matcher, rng = grammars.compile(made.params.structured_output), random.Random(seed)
    words = np.zeros((1, grammars.num_words), dtype=np.int32)  # [1, W]
    spelled = tokenizer.encode(head, add_special_tokens=False)
    tokens: list[int] = []
    while not matcher.is_complete and len(tokens) < 60:
        assert grammars.fill_masks([matcher], words) == [None]
        allowed = [token for token in range(words.shape[1] * 32) if words[0, token // 32] >> token % 32 & 1]
        token = spelled.pop(0) if spelled else rng.choice(allowed)
        assert token in allowed, tokenizer.token_text(token)
        if token in grammars.end_token_ids:
            break
        matcher.accept(token)
        tokens.append(token)
    parser, reasoning = made.readers()
    assert reasoning is not None
    reasoning.count_tokens(tokens, tokenizer)
    message = parse_all(parser, tokenizer.decode(tokens, skip_special_tokens=False), is_cut=True)
    assert bool(reasoning.num_tokens) is bool(message.reasoning)
    return message


FIELDS = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
FORM = StructuredOutput(json_schema=FIELDS)


@pytest.mark.parametrize("head", ["", THOUGHT])
@pytest.mark.parametrize("seed", range(3))
def test_a_form_comes_after_a_header_and_perhaps_a_thought(formats: AnswerFormats, head: str, seed: int) -> None:
    made = plan(formats, SamplingParams(structured_output=FORM), thinking_token_budget=4)
    message = drawn(formats, made, seed, head or ANSWER)
    assert "a" in json.loads(message.content)
    assert (message.reasoning, message.tool_calls) == ("Hm." if head else "", [])
    for effort in ("none", None):
        made = plan(
            formats, SamplingParams(structured_output=StructuredOutput(choice=["yes"])), reasoning_effort=effort
        )
        assert drawn(formats, made, seed, "" if effort else ANSWER).content == "yes"


@pytest.mark.parametrize("head", [CHANNEL + "commentary", THOUGHT])
def test_calls_that_have_to_be_made(formats: AnswerFormats, head: str) -> None:
    made = plan(formats, tools=[WEATHER], tool_choice="required")
    message = drawn(formats, made, 1, head)
    assert message.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("get_weather", {"city": "Bern"})
    ]


def test_what_may_be_a_call_or_an_answer(formats: AnswerFormats) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    call, text = f"{CHANNEL}commentary", f"{ANSWER}Hello"
    assert plan(formats, tools=[WEATHER]).params.structured_output is None
    assert plan(formats, tools=[WEATHER], parallel_tool_calls=False).params.structured_output is None
    made = plan(formats, tools=[strict])
    assert json.loads(drawn(formats, made, 1, call).tool_calls[0].arguments) == {"city": "Bern"}
    assert drawn(formats, made, 1, text).content.startswith("Hello")
    made = plan(formats, SamplingParams(structured_output=FORM), tools=[WEATHER])
    assert json.loads(drawn(formats, made, 1, call).tool_calls[0].arguments) == {"city": "Bern"}
    assert "a" in json.loads(drawn(formats, made, 1, ANSWER).content)


def test_a_budget_alone(formats: AnswerFormats) -> None:
    made = plan(formats, thinking_token_budget=3)
    text = drawn(formats, made, 2, f"{CHANNEL}analysis{MESSAGE}")
    assert text.reasoning
    made = plan(formats, thinking_token_budget=0)
    assert (
        drawn(formats, made, 2, f"{CHANNEL}analysis{MESSAGE}{END}{START}assistant{ANSWER}Hello").content[:5] == "Hello"
    )


def test_tokens_of_reasoning_are_counted(formats: AnswerFormats) -> None:
    head = f"{CHANNEL}analysis{MESSAGE}So it is."
    tokens = formats.tokenizer.encode(f"{head}{END}{START}assistant{ANSWER}A{RETURN}", add_special_tokens=False)
    _, reasoning = plan(formats).readers()
    assert reasoning is not None
    for token in tokens:
        reasoning.count_tokens([token], formats.tokenizer)
    assert reasoning.num_tokens == len(formats.tokenizer.encode("So it is.", add_special_tokens=False))


def test_marks_are_seen_and_stop_strings_end_content_only(formats: AnswerFormats) -> None:
    made = plan(formats, SamplingParams(stop=("m",)))
    assert not made.params.skip_special_tokens
    assert made.new_stop_finder is not None
    finder = made.new_stop_finder()
    shown, stop = finder.push(f"{THOUGHT}{ANSWER}<|im_start|>A lamp")
    assert stop == "m"
    message = parse_all(made.readers()[0], shown)
    assert (message.reasoning, message.content) == ("Hm.", "A la")


def test_an_answer_that_was_begun_goes_on(formats: AnswerFormats) -> None:
    prompt = formats.tokenizer.encode("Hi", add_special_tokens=False)
    assert formats.starts_inside(prompt, BegunAnswer(content="So", reasoning="")) is None
    assert formats.starts_inside(prompt, BegunAnswer(content="", reasoning="Hm")) is True
    opened = formats.tokenizer.encode(f"{START}assistant{ANSWER}", add_special_tokens=False)
    assert formats.starts_inside(opened) is None
    assert formats.starts_inside(formats.tokenizer.encode(f"{START}assistant", add_special_tokens=False)) is False


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": f"f{number}", "arguments": {"n": number}}}


def test_earlier_answers_are_written_as_the_template_has_them(formats: AnswerFormats) -> None:
    template = formats.tokenizer.chat_template
    assert template is not None
    results = [{"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number}"} for number in (2, 1)]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call(1), call(2)]}
    text = template.render([{"role": "user", "content": "Hi"}, answer, *results])
    assert f"{CHANNEL}analysis{MESSAGE}Hm.\n\nI look.{END}" in text
    marks = ["Hm.", "to=functions.f1", '{"n": 1}', '"r1"', "to=functions.f2", '{"n": 2}', '"r2"']
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    assert text.endswith(f"{START}assistant")


def test_either_name_means_the_whole_format(formats: AnswerFormats) -> None:
    for names in ({"tool_call_parser_name": "harmony"}, {"reasoning_parser_name": "harmony"}):
        named = AnswerFormats(formats.tokenizer, **names)
        assert named.is_harmony
        assert named.tool_calls is HarmonyParser
    assert AnswerFormats(formats.tokenizer, tool_call_parser_name="none").tool_calls is None
