"""Every form of answer against OpenAI's published description of it."""

from typing import Any

import jsonschema
import pytest
from tests.clients.published import check
from tests.clients.words import GREEDY, QUESTION, WEATHER, WEATHER_TOOL
from tests.server.http_server import HttpServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOOLS = {"messages": WEATHER, "tools": [WEATHER_TOOL]}
PROMPT = {"prompt": "Octavo is", "max_tokens": 8}

CHATS: list[dict[str, Any]] = [
    {"messages": QUESTION},
    {"messages": QUESTION, "max_tokens": 3, "n": 2, "temperature": 1, "seed": 1},
    {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, "max_tokens": 5},
    {"messages": QUESTION, "stop": ["is"]},
    {"messages": QUESTION, "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 60},
    {"messages": QUESTION, "response_format": {"type": "json_object"}, "max_tokens": 20},
    TOOLS,
    {**TOOLS, "tool_choice": "required"},
]
COMPLETIONS: list[dict[str, Any]] = [
    PROMPT,
    {**PROMPT, "logprobs": 2},
    {**PROMPT, "echo": True, "logprobs": 2},
    {**PROMPT, "prompt": ["a", "b"], "n": 2},
]
REFUSED: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", CHAT, {}, 400),
    ("POST", CHAT, {"messages": QUESTION, "temperature": -1}, 400),
    ("POST", CHAT, {"messages": QUESTION, "model": "other"}, 404),
    ("POST", TEXT, {"prompt": []}, 400),
    ("POST", TEXT, {"prompt": "a", "suffix": "b"}, 400),
    ("GET", CHAT, {}, 405),
    ("GET", "/nowhere", {}, 404),
    ("GET", "/v1/models/other", {}, 404),
]


@pytest.mark.parametrize("fields", CHATS)
def test_chat(server: HttpServer, fields: dict[str, Any]) -> None:
    check("CreateChatCompletionResponse", server.post(CHAT, {**GREEDY, **fields}).json())


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("fields", CHATS)
def test_chat_streamed(server: HttpServer, fields: dict[str, Any], options: dict[str, Any]) -> None:
    for chunk in server.stream(CHAT, {**GREEDY, **fields, **options}):
        check("CreateChatCompletionStreamResponse", chunk)
        assert chunk["choices"] or options


@pytest.mark.parametrize("fields", COMPLETIONS)
def test_completions(server: HttpServer, fields: dict[str, Any]) -> None:
    check("CreateCompletionResponse", server.post(TEXT, {**GREEDY, **fields}).json())
    for chunk in server.stream(TEXT, {**GREEDY, **fields}):
        check("CreateCompletionResponse", chunk)


@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED)
def test_refusals(server: HttpServer, method: str, path: str, body: dict[str, Any], status: int) -> None:
    response = server.client.request(method, path, json={**GREEDY, **body} if method == "POST" else None)
    assert response.status_code == status
    check("ErrorResponse", response.json())


def test_models(server: HttpServer) -> None:
    models = server.client.get("/v1/models").json()
    check("ListModelsResponse", models)
    assert models["data"][0]["max_model_len"] == 2048
    check("Model", server.client.get(f"/v1/models/{models['data'][0]['id']}").json())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.pop("created"),
        lambda answer: answer.update(created="now"),
        lambda answer: answer.update(colour="red"),
        lambda answer: answer["choices"][0].update(finish_reason="tired"),
        lambda answer: answer["choices"][0]["message"].pop("content"),
    ],
)
def test_the_judge_finds_faults(server: HttpServer, spoil: Any) -> None:
    answer = server.post(CHAT, {**GREEDY, "messages": QUESTION}).json()
    spoil(answer)
    with pytest.raises(jsonschema.ValidationError):
        check("CreateChatCompletionResponse", answer)
