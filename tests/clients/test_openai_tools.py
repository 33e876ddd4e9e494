"""openai-python with tools: calls whole and streamed, forced ones, and the turn after them.

The client of this version has no loop that runs tools for chat completions; `run_tools` below is the loop that its
users write.
"""

import copy
import json

import openai
import pydantic
import pytest
from openai import OpenAI
from tests.clients.words import FORECAST, GREEDY, QUESTION, WEATHER, WEATHER_TOOL


class GetWeather(pydantic.BaseModel):
    """Get the weather in a city"""

    city: str


def run_tools(client: OpenAI, question: list[dict[str, object]]) -> str:
    messages = list(question)
    for _ in range(3):
        message = client.chat.completions.create(**GREEDY, messages=messages, tools=[WEATHER_TOOL]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": FORECAST} for call in message.tool_calls]
    raise AssertionError(messages)


def test_a_call(client: OpenAI) -> None:
    choice = client.chat.completions.create(**GREEDY, messages=WEATHER, tools=[WEATHER_TOOL]).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "get_weather", {"city": "Rome"},
    )  # fmt: skip
    assert "<tool_call>" not in (choice.message.content or "")


def test_the_result_of_a_call_is_told(client: OpenAI) -> None:
    answer = run_tools(client, WEATHER)
    assert "21" in answer
    assert "Rome" in answer


def test_the_streaming_helper_gathers_a_call(client: OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=WEATHER, tools=[WEATHER_TOOL]) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert choice.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_strict_tools_parse_into_classes(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    message = client.chat.completions.parse(**GREEDY, messages=WEATHER, tools=[tool]).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_comes_whatever_was_asked(client: OpenAI, choice: object) -> None:
    tool = copy.deepcopy(WEATHER_TOOL)
    tool["function"]["parameters"]["properties"]["city"]["enum"] = ["Rome", "Oslo"]
    for stream in (False, True):
        fields = {**GREEDY, "messages": QUESTION, "tools": [tool], "tool_choice": choice}
        if stream:
            with client.chat.completions.stream(**fields) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**fields).choices[0].message
        arguments = json.loads(message.tool_calls[0].function.arguments)
        assert arguments["city"] in ("Rome", "Oslo")


def test_none_means_no_call(client: OpenAI) -> None:
    fields = {**GREEDY, "messages": WEATHER, "tools": [WEATHER_TOOL], "tool_choice": "none"}
    choice = client.chat.completions.create(**fields).choices[0]
    assert not choice.message.tool_calls
    assert choice.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": "required"},
        {"tools": [WEATHER_TOOL], "tool_choice": "sometimes"},
    ],
)
def test_choices_that_make_no_sense(client: OpenAI, fields: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=WEATHER, **fields)
    assert str(caught.value.param).startswith("tool")


def test_reasoning_is_beside_the_content(client: OpenAI) -> None:
    fields = {**GREEDY, "messages": [{"role": "user", "content": "What is 123 + 456?"}], "max_tokens": 300}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = client.chat.completions.create(**fields, extra_body=thinking).choices[0].message
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert "<think>" not in message.content
    assert "</think>" not in message.content
    with client.chat.completions.create(**fields, extra_body=thinking, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
