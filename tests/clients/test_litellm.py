"""LiteLLM, unchanged: it talks with any OpenAI-compatible server, and tells errors apart by their words."""

import json

import litellm
import pytest
from tests.clients.words import GREEDY, QUESTION, WEATHER, WEATHER_TOOL
from tests.server.http_server import HttpServer


def fields(server: HttpServer) -> dict[str, object]:
    return {
        **GREEDY, "model": "openai/demo", "api_base": f"{server.url}/v1", "api_key": "unused", "num_retries": 0,
    }  # fmt: skip


def test_whole_and_streamed(server: HttpServer) -> None:
    whole = litellm.completion(**fields(server), messages=QUESTION)
    chunks = list(litellm.completion(**fields(server), messages=QUESTION, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0


def test_responses(server: HttpServer) -> None:
    asked = {**fields(server), "input": "What is a block?"}
    whole = litellm.responses(**asked)
    events = list(litellm.responses(**asked, stream=True))
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output[0].content[0].text
    assert whole.usage.output_tokens > 0


def test_messages(server: HttpServer) -> None:
    """By the provider of Anthropic's API, with a chat's words."""
    asked = {**fields(server), "model": "anthropic/demo", "api_base": server.url, "max_tokens": 60}
    whole = litellm.completion(**asked, messages=QUESTION)
    chunks = list(litellm.completion(**asked, messages=QUESTION, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    called = litellm.completion(**asked, messages=WEATHER, tools=[WEATHER_TOOL])
    [call] = called.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})


async def test_async(server: HttpServer) -> None:
    stream = await litellm.acompletion(**fields(server), messages=QUESTION, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == litellm.completion(**fields(server), messages=QUESTION).choices[0].message.content


def test_tools(server: HttpServer) -> None:
    whole = litellm.completion(**fields(server), messages=WEATHER, tools=[WEATHER_TOOL])
    chunks = list(litellm.completion(**fields(server), messages=WEATHER, tools=[WEATHER_TOOL], stream=True))
    for answer in (whole, litellm.stream_chunk_builder(chunks, messages=WEATHER)):
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})


def test_reasoning(server: HttpServer) -> None:
    answer = litellm.completion(
        **fields(server),
        messages=[{"role": "user", "content": "What is 123 + 456?"}],
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    assert answer.choices[0].message.reasoning_content


def test_errors_are_recognized(server: HttpServer) -> None:
    too_long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**fields(server), messages=too_long)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**fields(server), "model": "openai/other"}, messages=QUESTION)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**fields(server), "temperature": -1}, messages=QUESTION)
