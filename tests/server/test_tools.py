"""Tool calls over real HTTP, with the demo model: whole and streamed, free and forced."""

import json
from typing import Any

import pytest
from tests.breadth import pick
from tests.server.http_server import HttpServer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2, 3]}, "kind": {"enum": ["north", "south"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY},
}
PLACE = {"type": "function", "function": {"name": "place", "parameters": POINT}}
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [QUESTION], "tools": [WEATHER], "temperature": 0}


def put_together(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reasons": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    message["calls"].append(call)
                else:
                    assert set(call) == {"index", "function"}
                    message["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def calls_of(server: HttpServer, **fields: Any) -> list[dict[str, Any]]:
    """The calls of a whole answer, which has nothing else."""
    response = server.post(PATH, BODY | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls: list[dict[str, Any]] = choice["message"]["tool_calls"]
    return calls


def test_the_model_calls_by_itself(server: HttpServer) -> None:
    (call,) = calls_of(server)
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_a_stream_brings_the_same_call(server: HttpServer) -> None:
    (whole,) = calls_of(server)
    message = put_together(server.stream(PATH, BODY))
    (call,) = message["calls"]
    assert call["function"] == whole["function"]
    assert call["id"] != whole["id"]
    assert (message["content"], message["reasons"]) == ("", ["tool_calls"])


def test_a_result_goes_back_to_the_model(server: HttpServer) -> None:
    (call,) = calls_of(server)
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21, "sky": "sunny"}'}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = server.post(PATH, BODY | {"messages": [QUESTION, said, result]}).json()
    assert "21" in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in reply["choices"][0]["message"]


@pytest.mark.parametrize("seed", range(pick(2, 6)))
def test_required_calls_match_their_schemas(server: HttpServer, seed: int) -> None:
    wild = {"temperature": 2.0, "seed": seed, "max_tokens": 400}
    schemas = {"tools": [PLACE, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = calls_of(server, **wild, **schemas)
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
    else:
        assert call["function"]["name"] == "place"
        assert set(arguments) == {"x", "kind"}
        assert arguments["x"] in (1, 2, 3)
        assert arguments["kind"] in ("north", "south")


def test_a_named_call_is_that_call_once(server: HttpServer) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    (call,) = calls_of(server, tools=[WEATHER, PLACE, NOW], tool_choice=named)
    assert (call["function"]["name"], call["function"]["arguments"].strip()[0]) == ("now", "{")


def test_strict_tools_match_in_free_text_too(server: HttpServer) -> None:
    strict = json.loads(json.dumps(WEATHER))
    strict["function"] |= {"strict": True, "parameters": CITY | {"properties": {"city": {"enum": ["Rome", "Oslo"]}}}}
    (call,) = calls_of(server, tools=[strict])
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_none_means_text(server: HttpServer) -> None:
    choice = server.post(PATH, BODY | {"tool_choice": "none"}).json()["choices"][0]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_several_samples_with_logprobs_in_a_stream(server: HttpServer) -> None:
    chunks = server.stream(PATH, BODY | {"n": 3, "logprobs": True, "top_logprobs": 1, "temperature": 0.5, "seed": 1})
    ids = set()
    for index in range(3):
        message = put_together(chunks, index)
        assert len(message["reasons"]) == 1
        for call in message["calls"]:
            ids.add(call["id"])
        rows = [
            row
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["logprobs"]
            for row in choice["logprobs"]["content"]
        ]
        text = b"".join(bytes(row["bytes"]) for row in rows).decode()
        assert text.count("<tool_call>") == len(message["calls"])
    assert len(ids) >= 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (
            {
                "tools": [
                    NOW,
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "object", "minProperties": "x"}},
                    },
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_what_is_refused(server: HttpServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(PATH, BODY | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("max_tokens", [2, 6, 12])
def test_calls_are_cut_by_the_length_cap_and_say_so(server: HttpServer, choice: str, max_tokens: int) -> None:
    cut = BODY | {"tool_choice": choice, "max_tokens": max_tokens}
    message = put_together(server.stream(PATH, cut))
    assert (message["reasons"], message["content"]) == (["length"], "")
    whole = server.post(PATH, cut).json()["choices"][0]
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("length", None if calls else "")
    assert [call["function"] for call in message["calls"]] == calls
    assert [call["name"] for call in calls] == ["get_weather"] * (max_tokens == 12)


def test_open_schemas_have_an_end(server: HttpServer) -> None:
    """Without `additionalProperties`, as pydantic and others write them: an object ends after its properties."""
    kinds = {"city": "string", "temperature": "integer", "sunny": "boolean"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    schema["required"] = list(kinds)
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    base = {"messages": [{"role": "user", "content": "It is 21 degrees in Oslo."}], "max_tokens": 200}
    for seed in range(3):
        asked = server.post(PATH, base | {"seed": seed, "response_format": shape}).json()["choices"][0]
        assert asked["finish_reason"] == "stop"
        called = server.post(PATH, base | {"seed": seed, "tools": [tool], "tool_choice": "required",
                                           "parallel_tool_calls": False}).json()["choices"][0]  # fmt: skip
        assert called["finish_reason"] == "tool_calls"
        for text in (asked["message"]["content"], called["message"]["tool_calls"][0]["function"]["arguments"]):
            assert set(json.loads(text)) == set(kinds)
