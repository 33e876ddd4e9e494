"""anthropic-python: messages whole and streamed, tools and the loop that runs them, thoughts, counts, forms, errors."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from tests.clients.words import ADA, FORECAST, QUESTION, RECORD, WEATHER, WEATHER_TOOL, Person
from tests.server.http_server import HttpServer

GREEDY: Any = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
FUNCTION = WEATHER_TOOL["function"]
TOOL: Any = {name: FUNCTION[name] for name in ("name", "description")} | {"input_schema": FUNCTION["parameters"]}
SUM: Any = [{"role": "user", "content": "What is 123 + 456?"}]
THINKING: Any = {"thinking": {"type": "enabled", "budget_tokens": 100}}


@pytest.fixture
def claude(server: HttpServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_claude(server: HttpServer) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, auth_token="unused", max_retries=0) as made:
        yield made


def test_a_message_and_its_stream(claude: Anthropic) -> None:
    message = claude.messages.create(**GREEDY, messages=QUESTION)
    [block] = message.content
    assert (block.type, message.stop_reason, message.role, message.type) == ("text", "end_turn", "assistant", "message")
    assert message._request_id
    with claude.messages.stream(**GREEDY, messages=QUESTION) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.content[0].text == block.text
    assert final.usage.output_tokens == message.usage.output_tokens
    kinds = (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.cache_creation_input_tokens)
    counted = claude.messages.count_tokens(model="demo", messages=QUESTION)
    assert sum(kinds) == counted.input_tokens
    raw = list(claude.messages.create(**GREEDY, messages=QUESTION, stream=True))
    assert [event.type for event in raw[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in raw[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_stream_of_the_async_client(async_claude: AsyncAnthropic) -> None:
    async with async_claude.beta.messages.stream(
        **GREEDY, messages=QUESTION, betas=["interleaved-thinking-2025-05-14"], stop_sequences=["piece"]
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text
    assert "piece" not in text
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "piece")


def test_a_tool_is_called_and_told_its_result(claude: Anthropic) -> None:
    fields = {**GREEDY, "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}
    message = claude.messages.create(**fields, messages=WEATHER)
    [call] = message.content
    assert (message.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "get_weather",
        {"city": "Rome"},
    )
    with claude.messages.stream(**fields, messages=WEATHER) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [same] = stream.get_final_message().content
    assert (same.name, same.input, json.loads("".join(pieces))) == (call.name, call.input, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": FORECAST}]}
    turns = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(**fields, messages=turns)
    assert "21" in answer.content[0].text
    assert answer.usage.cache_read_input_tokens > 0


def test_the_tool_runner_of_the_client(claude: Anthropic) -> None:
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        assert city == "Rome"
        return FORECAST

    runner = claude.beta.messages.tool_runner(**GREEDY, messages=WEATHER, tools=[anthropic.beta_tool(get_weather)])
    assert "21" in runner.until_done().content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "none"}])
def test_forced_and_forbidden_calls(claude: Anthropic, choice: Any) -> None:
    message = claude.messages.create(**GREEDY, messages=QUESTION, tools=[TOOL], tool_choice=choice)
    assert {block.type for block in message.content} == {"text" if choice["type"] == "none" else "tool_use"}


def test_thoughts_are_blocks_with_signatures(claude: Anthropic) -> None:
    thought, said = claude.messages.create(**GREEDY, **THINKING, messages=SUM).content
    assert (thought.type, bool(thought.thinking), bool(thought.signature), said.type) == (
        "thinking",
        True,
        True,
        "text",
    )
    with claude.messages.stream(**GREEDY, **THINKING, messages=SUM) as stream:
        order = [
            event.type for event in stream if event.type in ("thinking", "signature", "text", "content_block_stop")
        ]
        final = stream.get_final_message()
    again, text = final.content
    assert (again, text.text) == (thought, said.text)
    assert list(dict.fromkeys(order)) == ["thinking", "signature", "content_block_stop", "text"]
    turns = [*SUM, {"role": "assistant", "content": [thought, said]}, *QUESTION]
    assert claude.messages.create(**GREEDY, **THINKING, messages=turns).content[-1].type == "text"
    assert [block.type for block in claude.messages.create(**GREEDY, messages=SUM).content] == ["text"]


def test_an_answer_is_parsed_into_a_class(claude: Anthropic) -> None:
    assert claude.messages.parse(**GREEDY, messages=RECORD, output_format=Person).parsed_output == ADA


def test_errors_are_those_of_the_client(claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**{**GREEDY, "model": "claude"}, messages=QUESTION)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        claude.messages.create(**GREEDY, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(anthropic.BadRequestError, match="at least one message"):
        claude.messages.create(**GREEDY, messages=[], stream=True)
    with pytest.raises(anthropic.APIStatusError, match="time limit"):
        claude.messages.create(**GREEDY, messages=QUESTION, extra_headers={"X-Request-Timeout": "0.01"})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.list()


def test_the_models_of_the_server(claude: Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == ["demo"]


def test_what_is_typed_is_what_comes(claude: Anthropic) -> None:
    """The client reads leniently: this holds the answers to its types."""
    for fields in ({}, {"tools": [TOOL]}, THINKING):
        raw = claude.messages.with_raw_response.create(**GREEDY, **fields, messages=WEATHER)
        pydantic.TypeAdapter(anthropic.types.Message).validate_python(json.loads(raw.text()), strict=True)
        for event in claude.messages.create(**GREEDY, **fields, messages=WEATHER, stream=True):
            adapter = pydantic.TypeAdapter(type(event))
            adapter.validate_python(event.model_dump(exclude_unset=True), strict=True)
