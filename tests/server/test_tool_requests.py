"""What of a chat request's tools is refused, and what the rest means for prompt, grammar and messages. No engine."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.parsers.support import parse_all

from octavo.demo import demo_model_path
from octavo.sampling_params import SamplingParams
from octavo.server.http.errors import ApiError
from octavo.server.openai.answer_plan import AnswerFormats, AnswerPlan
from octavo.server.openai.birth import Birth
from octavo.server.openai.chat_prompt import BegunAnswer, template_messages, unread_parts
from octavo.server.openai.parsers.json_calls import HermesParser
from octavo.server.openai.parsers.pythonic import PythonicParser
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage
from octavo.server.openai.tools import tool_wire_names
from octavo.structured_output import Reasoning, StructuredOutput
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(demo_model_path())
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "parameters": SCHEMA}
PLAIN: dict[str, Any] = {"name": "now"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tools(*functions: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    some = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return msgspec.json.decode(json.dumps(body), type=ChatCompletionRequest)


def plan(params: SamplingParams | None = None, parser: str = "auto", **fields: Any) -> AnswerPlan:
    formats = AnswerFormats(TOKENIZER, tool_call_parser_name=parser)
    return AnswerPlan.of(request(**fields), params or SamplingParams(), formats)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": tools(WEATHER), "tool_choice": "always"}, "tool_choice"),
        ({"tools": tools(WEATHER), "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": tools(WEATHER, WEATHER)}, "tools[1].function.name"),
        ({"tools": tools({"name": ""})}, "tools[0].function.name"),
        ({"tools": tools({"name": "a b"})}, "tools[0].function.name"),
        ({"tools": tools(PLAIN, {"name": "f", "parameters": {"type": "array"}})}, "tools[1].function.parameters"),
        ({"tools": [{"type": "retrieval", "function": PLAIN}]}, "tools[0].type"),
        ({"tools": tools(PLAIN) * 1001}, "tools"),
        ({"tools": tools(PLAIN), "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": tools(PLAIN), "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": tools(PLAIN), "tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"tools": tools(PLAIN), "tool_choice": allowed("always", "now")}, "tool_choice.allowed_tools.mode"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    assert (caught.value.status, caught.value.detail.param) == (400, param)


def test_a_schema_that_is_too_deep_is_refused_by_name() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ApiError, match="levels deep") as caught:
        plan(tools=tools({"name": "f", "parameters": deep}))
    assert caught.value.detail.param == "tools[0].function.parameters"


def test_arguments_may_be_an_object_in_a_list_of_types() -> None:
    made = plan(tools=tools({"name": "f", "parameters": SCHEMA | {"type": ["object"]}}), tool_choice="required")
    assert made.tools is not None
    assert made.tools.schemas["f"] == SCHEMA | {"additionalProperties": False}


def test_what_the_chat_template_does_not_read_is_named() -> None:
    plain = ChatTemplate("{{ messages[0].content }}")
    warnings = list(unread_parts(request(reasoning_effort="low"), plain, has_tools=True))
    assert ["show the tools" in text for text in warnings] == [True, False]
    assert warnings[1].startswith("reasoning_effort does not change the prompt")
    assert not list(unread_parts(request(), plain, has_tools=False))


def test_tools_need_a_model_that_calls() -> None:
    with pytest.raises(ApiError, match="--tool-call-parser"):
        plan(parser="none", tools=tools(PLAIN))
    assert plan(parser="none", tools=tools(PLAIN), tool_choice="none").tools is None


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": tools(PLAIN), "tool_choice": "none"}])
def test_without_calls_all_is_as_without_tools(fields: dict[str, Any]) -> None:
    made = plan(**fields)
    assert made.tools is None
    assert "tools" not in made.prompt_options
    assert made.params == SamplingParams()


@pytest.mark.parametrize("parser", ["hermes", "mistral", "mistral_args", "qwen3_coder"])
def test_auto_leaves_the_text_free_and_a_call_the_names_that_are_offered(parser: str) -> None:
    made = plan(parser=parser, tools=tools(WEATHER, PLAIN))
    constraint = made.params.structured_output
    assert constraint is not None
    assert (constraint.free_text, constraint.min_tags, constraint.max_tags) == (True, 0, None)
    for name in ("get_weather", "now"):
        assert any(name in f"{tag.begin}{tag.grammar}" for tag in constraint.tags)


@pytest.mark.parametrize("parser", ["llama3_json", "pythonic"])
def test_auto_needs_no_constraint_where_a_call_begins_with_its_name(parser: str) -> None:
    made = plan(parser=parser, tools=tools(WEATHER, PLAIN))
    assert made.params.structured_output is None
    assert [tool["function"]["name"] for tool in made.prompt_options["tools"]] == ["get_weather", "now"]  # type: ignore[attr-defined]


def test_the_prompt_shows_tools_as_models_know_them() -> None:
    made = plan(tools=tools(WEATHER | {"strict": True}, PLAIN))
    assert made.prompt_options["tools"] == [
        {"type": "function", "function": WEATHER},
        {"type": "function", "function": PLAIN | {"parameters": {"type": "object", "properties": {}}}},
    ]


def test_strict_tools_are_held_to_their_schema_within_free_text() -> None:
    constraint = plan(tools=tools(WEATHER | {"strict": True}, PLAIN)).params.structured_output
    assert constraint is not None
    assert constraint.free_text
    assert json.loads(str(constraint.tags[0].json_schema)) == SCHEMA | {"additionalProperties": False}
    assert json.loads(str(constraint.tags[1].json_schema)) == NOTHING
    loose = plan(tools=tools(WEATHER, PLAIN)).params.structured_output
    assert loose is not None
    assert [json.loads(str(tag.json_schema)) for tag in loose.tags] == [{"type": "object"}, NOTHING]


def test_required_and_named_calls_are_forced() -> None:
    required = plan(tools=tools(WEATHER, PLAIN), tool_choice="required").params.structured_output
    assert required is not None
    assert (required.free_text, len(required.tags), required.max_tags) == (False, 2, None)
    choice = {"type": "function", "function": {"name": "now"}}
    named = plan(tools=tools(WEATHER, PLAIN), tool_choice=choice).params.structured_output
    assert named is not None
    assert (len(named.tags), named.max_tags) == (1, 1)
    assert '"now"' in named.tags[0].begin


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_though_all_are_shown(mode: str) -> None:
    made = plan(tools=tools(WEATHER, PLAIN), tool_choice=allowed(mode, "now"))
    constraint = made.params.structured_output
    assert constraint is not None
    assert (constraint.free_text, constraint.max_tags, len(constraint.tags)) == (mode == "auto", None, 1)
    assert '"now"' in constraint.tags[0].begin
    assert made.tools is not None
    assert len(made.tools.prompt_tools) == 2


def test_errors_about_schemas_lead_to_the_tool() -> None:
    both = request(tools=tools(WEATHER, PLAIN))
    assert set(tool_wire_names(both).values()) == {"tools[0].function.parameters", "tools[1].function.parameters"}
    second = request(tools=tools(WEATHER, PLAIN), tool_choice=allowed("auto", "now"))
    assert tool_wire_names(second)["structured_output.tags[0].json_schema"] == "tools[1].function.parameters"
    assert tool_wire_names(request(tool_choice="required")) == {}


def test_no_parallel_calls_means_one_at_most() -> None:
    single = plan(tools=tools(PLAIN), parallel_tool_calls=False).params.structured_output
    assert single is not None
    assert (single.free_text, single.max_tags) == (True, 1)


def test_a_form_for_answers_and_tools_go_together() -> None:
    answer = SamplingParams(structured_output=StructuredOutput(json_schema=SCHEMA))
    constraint = plan(answer, tools=tools(PLAIN)).params.structured_output
    assert constraint is not None
    assert [tag.begin[:11] for tag in constraint.tags] == ["<tool_call>", ""]
    forced = plan(answer, tools=tools(PLAIN), tool_choice="required").params.structured_output
    assert forced is not None
    assert len(forced.tags) == 1
    regex = SamplingParams(structured_output=StructuredOutput(regex="[ab]"))
    assert plan(regex, tools=tools(PLAIN)).params == regex


def test_a_format_that_cannot_tell_a_schema_is_forced_in_another_and_read_so() -> None:
    odd = {"name": "f", "parameters": {"type": "object", "anyOf": [SCHEMA]}}
    made = plan(parser="pythonic", tools=tools(odd), tool_choice="required")
    assert made.tools is not None
    assert made.tools.parser(made.params) is HermesParser
    plain = plan(parser="pythonic", tools=tools(PLAIN), tool_choice="required")
    assert plain.tools is not None
    assert plain.tools.parser(plain.params) is PythonicParser


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_what_the_template_is_told_of_thinking(fields: dict[str, Any], options: dict[str, object]) -> None:
    assert plan(**fields).prompt_options == options


def test_history_as_templates_read_it() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    bare = {"function": {"name": "g", "arguments": ""}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call, broken, bare]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
        {"role": "user", "content": "So?", "name": "Ann", "tool_calls": []},
    ]
    plain = template_messages(msgspec.json.decode(json.dumps(messages), type=list[ChatMessage]), TOKENIZER, print)
    assert plain[0] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "tool_calls": [
            call | {"function": {"name": "f", "arguments": {"a": [1]}}},
            broken,
            {"type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }
    del messages[-1]["tool_calls"]
    messages[1]["content"] = "7"
    assert plain[1:] == messages[1:]
    assert "<tool_call>" in TOKENIZER.render_chat(plain)


@pytest.mark.parametrize("parser", ["pythonic", "qwen3_coder"])
def test_a_format_that_cannot_tell_a_schema_stays_free_with_auto(parser: str, caplog: pytest.LogCaptureFixture) -> None:
    odd = {"name": "f", "parameters": {"type": "object", "anyOf": [SCHEMA]}}
    single = plan(parser=parser, tools=tools(odd), parallel_tool_calls=False)
    assert single.params.structured_output is None
    assert not caplog.records
    assert plan(parser=parser, tools=tools(odd | {"strict": True})).params.structured_output is None
    assert "cannot constrain calls" in caplog.text
    assert plan(parser=parser, tools=tools(WEATHER | {"strict": True})).params.structured_output is not None


@pytest.mark.parametrize(("parser", "length"), [("hermes", 29), ("mistral", 9)])
def test_a_request_computed_again_gives_its_calls_the_same_ids(parser: str, length: int) -> None:
    made, birth = plan(parser=parser, tools=tools(PLAIN)), Birth()
    text = {
        "hermes": '<tool_call>{"name": "now"}</tool_call>' * 2,
        "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    }[parser]

    def ids(birth: Birth, choice: int) -> list[str]:
        return [call.id for call in parse_all(made.readers(birth.call_ids(choice))[0], text).tool_calls]

    assert ids(birth, 0) == ids(birth, 0)
    every = ids(birth, 0) + ids(birth, 1) + ids(Birth(), 0)
    assert len(set(every)) == 6
    assert {len(each) for each in every} == {length}
    assert all(each.removeprefix("call_").isalnum() for each in every)


def test_marks_that_are_special_tokens_are_seen_and_other_special_tokens_are_not(tmp_path: Path) -> None:
    config = json.loads((demo_model_path() / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["additional_special_tokens"] = ["<tool_call>", "</tool_call>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    formats = AnswerFormats(Tokenizer.from_path(tmp_path))
    assert "<tool_call>" in formats.special_tokens
    made = AnswerPlan.of(request(tools=tools(PLAIN)), SamplingParams(), formats)
    assert not made.params.skip_special_tokens
    text = 'Hi<|im_start|>!<tool_call>{"name": "now"}</tool_call><|endoftext|>'
    message = parse_all(made.readers()[0], text)
    assert (message.content, [call.name for call in message.tool_calls]) == ("Hi!", ["now"])
    shown = AnswerPlan.of(request(tools=tools(PLAIN)), SamplingParams(skip_special_tokens=False), formats)
    assert parse_all(shown.readers()[0], text).content == "Hi<|im_start|>!<|endoftext|>"
    assert AnswerPlan.of(request(), SamplingParams(), formats).params.skip_special_tokens


@pytest.mark.parametrize(
    ("budget", "constraint", "inside"),
    [
        (None, None, False),
        (5, None, False),
        (None, StructuredOutput(regex="a"), False),
        (5, StructuredOutput(regex="a"), True),
    ],
)
def test_thoughts_come_before_forms_and_have_a_budget(
    budget: int | None, constraint: StructuredOutput | None, inside: bool
) -> None:
    prompt = "<|im_start|>assistant\n" + ("<think>\n" if inside else "")
    settled = plan(SamplingParams(structured_output=constraint), thinking_token_budget=budget).after(
        TOKENIZER.encode(prompt)
    )
    found = settled.params.structured_output
    if budget is None and constraint is None:
        assert found is None
    else:
        assert found is not None
        assert found.reasoning == Reasoning(is_open=inside, max_tokens=budget)
        assert found.regex == (None if constraint is None else constraint.regex)
    assert settled.starts_inside is inside


def test_a_thought_that_ends_the_prompt_goes_on_without_being_asked_to() -> None:
    """With `add_generation_prompt: false`, if the template ends no message."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nThis is"}]
    made = request(messages=messages, add_generation_prompt=False)
    ended = TOKENIZER.encode("<|im_start|>assistant\n<think>\nThis is<|im_end|>\n")
    assert BegunAnswer.of(made, ended, TOKENIZER) is None
    begun = BegunAnswer.of(made, prompt := TOKENIZER.encode("<|im_start|>assistant\n<think>\nThis is"), TOKENIZER)
    assert begun is not None
    assert BegunAnswer.of(request(messages=messages), prompt, TOKENIZER) is None
    settled = plan(thinking_token_budget=5).after(prompt, begun)
    assert (settled.starts_inside, settled.is_continued) == (True, True)
    assert settled.params.structured_output == StructuredOutput(reasoning=Reasoning(is_open=True, max_tokens=5))


def test_a_prompt_that_closed_the_thoughts_leaves_forms_alone() -> None:
    constraint = StructuredOutput(regex="a")
    prompt = TOKENIZER.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    settled = plan(SamplingParams(structured_output=constraint), thinking_token_budget=5).after(prompt)
    assert settled.params.structured_output == constraint
    assert settled.starts_inside is None


def test_a_client_that_wants_no_thoughts_gets_none_before_a_form() -> None:
    constraint, opened = StructuredOutput(regex="a"), TOKENIZER.encode("<|im_start|>assistant\n<think>\n")
    params = SamplingParams(structured_output=constraint)
    switches: list[dict[str, Any]] = [{"enable_thinking": False}, {"thinking": False}]
    ways: list[dict[str, Any]] = [{"reasoning_effort": "none"}, *({"chat_template_kwargs": each} for each in switches)]
    for fields in ways:
        settled = plan(params, **fields).after([1, 5])
        assert settled.params.structured_output == constraint
        assert settled.starts_inside is None  # text that reads like a tag is content
        closed = plan(params, **fields).after(opened)  # the template opens a thought whatever it is told
        assert closed.params.structured_output == replace(constraint, reasoning=Reasoning(is_open=True, max_tokens=0))
        assert plan(**fields).after([1, 5]).params.structured_output is None


def test_tags_that_are_no_tokens_leave_no_room_for_thoughts_before_a_form() -> None:
    formats = AnswerFormats(TOKENIZER, reasoning_parser_name="mistral")
    constraint = SamplingParams(structured_output=StructuredOutput(regex="a"))
    settled = AnswerPlan.of(request(), constraint, formats).after([1, 5])
    assert settled.params == constraint
    assert settled.starts_inside is None
    tool_calls = AnswerPlan.of(request(tools=tools(PLAIN)), SamplingParams(), formats)
    assert tool_calls.after([1, 5]).starts_inside is False  # reasoning is part of the free text before calls
    with pytest.raises(ApiError, match="cannot be counted"):
        AnswerPlan.of(request(thinking_token_budget=3), SamplingParams(), formats).after([1, 5])


@pytest.mark.parametrize("budget", [-1, 1 << 30])
def test_budgets_have_limits(budget: int) -> None:
    with pytest.raises(ApiError, match="thinking_token_budget"):
        plan(thinking_token_budget=budget)


def test_the_type_of_a_tool_may_be_left_out() -> None:
    for left_out in ({}, {"type": None}):
        assert plan(tools=[left_out | {"function": WEATHER}]).tools == plan(tools=tools(WEATHER)).tools


def test_calls_and_results_under_their_older_names_are_calls_and_results() -> None:
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    call, result = template_messages(
        msgspec.json.decode(json.dumps(messages), type=list[ChatMessage]), TOKENIZER, print
    )
    assert call == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
    }
    assert result == {"role": "tool", "name": "now", "content": "noon"}
