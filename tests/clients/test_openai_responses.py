"""openai-python's `client.responses`: whole, streamed, parsed, with tools of every kind, kept, in the background."""

import json
from typing import Any

import pydantic
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from tests.clients.words import ADA, FORECAST, MODEL, WEATHER, WEATHER_TOOL, Person
from tests.server.http_server import HttpServer

GREEDY: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
QUESTION = "What is a block?"
RECORD = "JSON please: name Ada, age 36, city Rome"
TOOL: Any = {"type": "function", "strict": False, **WEATHER_TOOL["function"]}
SHELL: Any = {"type": "custom", "name": "shell", "description": "Run a command"}
THINKING: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 20}}


def test_a_response_and_its_stream(client: OpenAI) -> None:
    reply = client.responses.create(**GREEDY, input=QUESTION)
    assert reply.status == "completed"
    assert reply.output_text
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens >= 0
    with client.responses.stream(**GREEDY, input=QUESTION) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == reply.output_text
    raw = list(client.responses.create(**GREEDY, input=QUESTION, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert (raw[0].type, raw[-1].type) == ("response.created", "response.completed")


async def test_the_async_client(async_client: AsyncOpenAI) -> None:
    async with async_client.responses.stream(**GREEDY, input=QUESTION, instructions="You are kind.") as stream:
        async for event in stream:
            assert event.type != "error"
        assert (await stream.get_final_response()).output_text


def test_a_function_is_called_and_told_its_result(client: OpenAI) -> None:
    reply = client.responses.create(**GREEDY, input=WEATHER, tools=[TOOL])
    [call] = reply.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Rome"}
    with client.responses.stream(**GREEDY, input=WEATHER, tools=[TOOL]) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [same] = stream.get_final_response().output
    assert (same.type, "".join(pieces)) == ("function_call", call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": FORECAST}
    items: Any = [*WEATHER, *reply.output, result]
    answer = client.responses.create(**GREEDY, input=items, tools=[TOOL])
    kept = client.responses.create(**GREEDY, input=[result], tools=[TOOL], previous_response_id=reply.id)
    assert "21" in answer.output_text
    assert kept.output_text == answer.output_text


def test_a_custom_tool(client: OpenAI) -> None:
    choice: Any = {"type": "custom", "name": "shell"}
    with client.responses.stream(**GREEDY, input="ls", tools=[SHELL], tool_choice=choice) as stream:
        events = list(stream)
    done = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    [call] = [event.item for event in events if event.type == "response.output_item.done"]
    assert call.type == "custom_tool_call"
    assert call.input == done[0].input


def test_text_is_parsed(client: OpenAI) -> None:
    assert client.responses.parse(**GREEDY, input=RECORD, text_format=Person).output_parsed == ADA
    with client.responses.stream(**GREEDY, input=RECORD, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == ADA


def test_thoughts(client: OpenAI) -> None:
    asked: Any = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, **THINKING}
    with client.responses.stream(**GREEDY, input="What is 123 + 456?", **asked) as stream:
        summary = "".join(event.delta for event in stream if event.type == "response.reasoning_summary_text.delta")
        final = stream.get_final_response()
    thought = final.output[0]
    assert thought.type == "reasoning"
    assert thought.summary[0].text == summary
    assert thought.encrypted_content
    plain = client.responses.create(**GREEDY, input="What is 123 + 456?", **THINKING).output[0]
    assert plain.type == "reasoning"
    assert plain.content is not None
    assert plain.content[0].text == summary


def test_what_is_kept(client: OpenAI) -> None:
    reply = client.responses.create(**GREEDY, input=QUESTION)
    assert client.responses.retrieve(reply.id).output_text == reply.output_text
    [item] = client.responses.input_items.list(reply.id).data
    assert item.type == "message"
    client.responses.delete(reply.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(reply.id)
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**GREEDY, input="And?", previous_response_id=reply.id)
    assert caught.value.code == "previous_response_not_found"


def test_in_the_background(client: OpenAI) -> None:
    begun = client.responses.create(**GREEDY, input=QUESTION, background=True)
    while (reply := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        pass
    assert reply.output_text == client.responses.create(**GREEDY, input=QUESTION).output_text
    assert client.responses.cancel(begun.id).status == "completed"
    with client.responses.stream(response_id=begun.id, starting_after=3) as stream:
        assert stream.get_final_response().output_text == reply.output_text


def test_counts_and_models(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert counted.input_tokens > 3
    assert client.models.list().data[0].id == MODEL


BODIES: list[dict[str, Any]] = [
    {"input": QUESTION, "instructions": "You are kind.", "metadata": {"a": "b"}},
    {"input": QUESTION, "max_output_tokens": 3},
    {"input": WEATHER, "tools": [TOOL, SHELL, {"type": "web_search"}]},
    {"input": "ls", "tools": [SHELL], "tool_choice": {"type": "custom", "name": "shell"}},
    {"input": WEATHER, "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]}]},
    {"input": "What is 123 + 456?", "include": ["reasoning.encrypted_content"], **THINKING["extra_body"]},
    {"input": "What is 123 + 456?", "reasoning": {"summary": "auto"}, **THINKING["extra_body"]},
    {"input": QUESTION, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"input": RECORD, "text": {"format": {"type": "json_object"}}},
]


@pytest.mark.parametrize("body", BODIES)
def test_every_event_and_response_is_as_published(server: HttpServer, body: dict[str, Any]) -> None:
    """Held to the models of OpenAI's own package: nothing is missing, nothing of another type."""
    fields = {**GREEDY, **body}
    Response.model_validate(server.post("/v1/responses", fields).json())
    adapter: Any = pydantic.TypeAdapter(ResponseStreamEvent)
    with server.client.stream("POST", "/v1/responses", json={**fields, "stream": True}) as response:
        frames = response.read().decode().split("\n\n")[:-1]
    for frame in frames:
        event = json.loads(frame.partition("\ndata: ")[2])
        assert adapter.validate_python(event).type == event["type"]
