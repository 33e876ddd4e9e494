"""Ollama's own Python client, unchanged, and a conversation as Home Assistant has it through that client."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ollama
import pytest
from openai import OpenAI
from tests.clients.words import ADA, FORECAST, GREEDY, MODEL, QUESTION, RECORD, WEATHER, WEATHER_TOOL, Person
from tests.server.http_server import HttpServer

SURE = {"temperature": 0}
SUM: Any = [{"role": "user", "content": "What is 123 + 456?"}]
MAX_TURNS = 10  # of tools, as in Home Assistant


@pytest.fixture
def local(server: HttpServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as made:
        yield made


@pytest.fixture
async def async_local(server: HttpServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=server.url) as made:
        yield made


def test_a_chat_whole_and_streamed(local: ollama.Client, client: OpenAI) -> None:
    reply = local.chat(MODEL, QUESTION, options=SURE)
    assert (
        reply.message.content == client.chat.completions.create(**GREEDY, messages=QUESTION).choices[0].message.content
    )
    assert (reply.model, reply.done, reply.done_reason, reply.load_duration) == (MODEL, True, "stop", 0)
    assert min(reply.total_duration, reply.eval_duration, reply.prompt_eval_count, reply.eval_count) > 0
    *pieces, last = local.chat(f"{MODEL}:latest", QUESTION, options=SURE, stream=True, keep_alive=-1)
    assert "".join(piece.message.content for piece in pieces) == reply.message.content
    assert (last.done, last.message.content, last.eval_count) == (True, "", reply.eval_count)


def test_prompts(local: ollama.Client) -> None:
    prompt = QUESTION[0]["content"]
    reply = local.generate(MODEL, prompt, options=SURE)
    assert reply.response == local.chat(MODEL, QUESTION, options=SURE).message.content
    assert (
        "".join(piece.response for piece in local.generate(MODEL, prompt, options=SURE, stream=True)) == reply.response
    )
    raw = local.generate(
        MODEL, "Octavo is", raw=True, options={**SURE, "num_predict": 4}, logprobs=True, top_logprobs=1
    )
    assert "".join(row.token for row in raw.logprobs) == raw.response
    assert (raw.eval_count, raw.done_reason) == (4, "length")
    assert local.generate(MODEL).done_reason == "load"


def test_thinking(local: ollama.Client) -> None:
    message = local.chat(MODEL, SUM, think=True, options=SURE).message
    assert message.thinking
    assert "579" in message.content
    pieces = list(local.chat(MODEL, SUM, think="low", options=SURE, stream=True))
    assert "".join(piece.message.thinking or "" for piece in pieces) == message.thinking
    assert local.chat(MODEL, SUM, think=False, options=SURE).message.thinking is None


def test_formats(local: ollama.Client) -> None:
    reply = local.chat(MODEL, RECORD, format=Person.model_json_schema(), options=SURE, think=False)
    assert Person.model_validate_json(reply.message.content) == ADA
    assert isinstance(json.loads(local.chat(MODEL, RECORD, format="json", options=SURE).message.content), dict)


def get_weather(city: str) -> str:
    """Get the weather in a city

    Args:
        city: the city
    """
    return f"{city}: {FORECAST}"


def test_tools_as_functions(local: ollama.Client) -> None:
    messages = list(WEATHER)
    message = local.chat(MODEL, messages, tools=[get_weather], options=SURE).message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    messages += [
        message,
        {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)},
    ]
    assert local.chat(MODEL, messages, tools=[get_weather], options=SURE).message.content


async def test_a_conversation_of_home_assistant(async_local: ollama.AsyncClient) -> None:
    """Streams with tools until an answer comes without calls; then a task that asks for data by a schema."""
    assert [model.model for model in (await async_local.list()).models] == [f"{MODEL}:latest"]
    said = {"tools": [WEATHER_TOOL], "keep_alive": -1, "options": {"num_ctx": 8192, **SURE}, "think": False}
    history: list[Any] = list(WEATHER)
    for _ in range(MAX_TURNS):
        text, calls, reasons = "", [], []
        async for part in await async_local.chat(MODEL, history, stream=True, **said):
            message = part["message"]
            text += message.get("content") or ""
            for call in message.get("tool_calls") or ():
                assert isinstance(call["function"]["arguments"], dict)
                calls.append(ollama.Message.ToolCall(function=call["function"]))
            reasons += [part["done_reason"]] if part.get("done") else []
        assert reasons == ["stop"]
        history.append(ollama.Message(role="assistant", content=text, tool_calls=calls or None))
        if not calls:
            break
        history += [ollama.Message(role="tool", content=FORECAST) for _ in calls]
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "assistant"]
    assert "21" in history[-1].content
    task = await async_local.chat(MODEL, RECORD, format=Person.model_json_schema(), keep_alive="300s", options=SURE)
    assert Person.model_validate_json(task.message.content) == ADA


def test_vectors(local: ollama.Client, client: OpenAI) -> None:
    texts = ["Hello", "world"]
    reply = local.embed(MODEL, texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [list(vector) for vector in reply.embeddings] == [each.embedding for each in plain.data]
    assert local.embeddings(MODEL, "Hello").embedding == reply.embeddings[0]
    assert reply.prompt_eval_count == plain.usage.prompt_tokens


def test_the_model(local: ollama.Client) -> None:
    [running] = local.ps().models
    assert (running.name, running.context_length) == (f"{MODEL}:latest", 2048)
    shown = local.show(MODEL)
    assert {"completion", "tools", "thinking"} == set(shown.capabilities)
    assert shown.modelinfo["general.architecture"] == shown.details.family
    assert local.pull(MODEL).status == "success"
    assert [state.status for state in local.pull(MODEL, stream=True)][-1] == "success"


def test_errors(local: ollama.Client) -> None:
    for model, fields, status, named in (
        ("llama3", {}, 404, "model 'llama3' not found"),
        (MODEL, {"options": {"temperature": -1}}, 400, "options.temperature=-1"),
        (MODEL, {"format": {"type": "nope"}}, 400, "format="),
    ):
        for is_stream in (False, True):
            with pytest.raises(ollama.ResponseError) as caught:
                list(local.chat(model, QUESTION, stream=is_stream, **fields))
            assert caught.value.status_code == status
            assert named in caught.value.error
