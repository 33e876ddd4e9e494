"""OpenAI's Responses API over real HTTP, with the demo model: whole, streamed, tools, thoughts, forms, errors."""

import json
import re
from typing import Any

import pytest
from tests.server.http_server import HttpServer
from tests.server.responses_client import PATH, stream, stream_events, text_of, whole, without_ids

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is a block?"}
ASK: dict[str, Any] = {"model": "demo", "input": "What is a block?", "temperature": 0, "max_output_tokens": 60}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}
TOOLS = ASK | {"input": "What is the weather in Paris?", "tools": [WEATHER]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
SHELL = {"type": "custom", "name": "shell", "description": "Run a command", "format": {"type": "text"}}
SUM = ASK | {"input": "What is 123 + 456?", "max_output_tokens": 200, "chat_template_kwargs": {"enable_thinking": True}}
THINKING = SUM | {"thinking_token_budget": 10}
FEW = {"max_output_tokens": 40}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
RECORD = ASK | {"input": "JSON please: name Ada, age 36", "text": FORM}


def chat_of(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(CHAT, {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    "body",
    [
        ASK,
        ASK | {"max_output_tokens": 3},
        TOOLS,
        TOOLS | {"max_output_tokens": 12},
        TOOLS | {"tools": [SHELL], "tool_choice": "required", "parallel_tool_calls": False},
        THINKING | FEW,
        THINKING | FEW | {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        THINKING | FEW | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        RECORD,
    ],
)
def test_a_stream_makes_the_same_response(server: HttpServer, body: dict[str, Any]) -> None:
    assert without_ids(stream(server, body)) == without_ids(whole(server, body))


def test_a_response_is_the_chat_of_the_same_conversation(server: HttpServer) -> None:
    reply = whole(server, ASK | {"instructions": "You are kind.", "metadata": {"a": "b"}})
    system = {"role": "system", "content": "You are kind."}
    [item] = reply["output"]
    said = chat_of(server, {"messages": [system, QUESTION]})["content"]
    assert item["content"] == [{"type": "output_text", "text": said, "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (reply["object"], reply["model"], reply["status"], reply["error"]) == ("response", "demo", "completed", None)
    assert reply["id"].startswith("resp_")
    assert item["id"].startswith("msg_")
    assert (reply["instructions"], reply["metadata"], reply["temperature"]) == ("You are kind.", {"a": "b"}, 0)
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}


def test_instructions_stand_first_as_one_message(server: HttpServer) -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    reply = whole(server, ASK | {"instructions": "You are kind.", "input": [developer, QUESTION]})
    system = {"role": "system", "content": "You are kind.\n\nBe brief."}
    assert text_of(reply) == chat_of(server, {"messages": [system, QUESTION]})["content"]


def test_a_response_that_is_cut_off_says_so(server: HttpServer) -> None:
    reply = whole(server, ASK | {"max_output_tokens": 3})
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete"
    assert stream_events(server, ASK | {"max_output_tokens": 3})[-1]["type"] == "response.incomplete"
    call = whole(server, TOOLS | {"max_output_tokens": 12})["output"][0]
    assert (call["type"], call["status"], call["name"]) == ("function_call", "incomplete", "get_weather")


def test_a_function_is_called_and_its_output_goes_back(server: HttpServer) -> None:
    [call] = whole(server, TOOLS)["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    assert call["id"] != call["call_id"]
    sunny = '{"temperature": 21, "sky": "sunny"}'
    asked = {"role": "user", "content": TOOLS["input"]}
    texts = []
    for output in (sunny, [{"type": "input_text", "text": sunny}]):
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        texts.append(text_of(whole(server, TOOLS | {"input": [asked, call, result]})))
    made = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    function = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    chat = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": sunny},
    ]
    expected = chat_of(server, {"messages": chat, "tools": [{"type": "function", "function": function}]})["content"]
    assert "21" in expected
    assert texts == [expected, expected]


def test_a_custom_tool_gets_its_raw_input(server: HttpServer) -> None:
    body = ASK | {"input": "List the files", "tools": [SHELL], "tool_choice": {"type": "custom", "name": "shell"}}
    events = stream_events(server, body)
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "shell")
    assert "arguments" not in call
    kinds = [event["type"] for event in events]
    assert "response.custom_tool_call_input.done" in kinds
    assert not any("function_call_arguments" in kind for kind in kinds)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "a.txt"}
    told = whole(server, body | {"input": [QUESTION, call, output], "tool_choice": "none"})
    assert told["status"] in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("syntax", "definition", "followed"),
    [
        ("regex", r'say "[a-c]{2,4}"\n', r'say "[a-c]{2,4}"\n'),
        ("lark", 'start: verb LF word\nverb: "say" | "cry"\nword: /.[xy]/\n%import common.LF', "(say|cry)\n.[xy]"),
    ],
)
def test_a_custom_tool_gets_input_by_its_grammar(
    server: HttpServer, syntax: str, definition: str, followed: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [WEATHER, SHELL | {"format": form}]
    body = ASK | {"input": "Hello", "tools": tools, "tool_choice": {"type": "custom", "name": "shell"}}
    [call] = whole(server, body | {"reasoning": {"effort": "none"}, "max_output_tokens": 60})["output"]
    assert call["type"] == "custom_tool_call"
    assert re.fullmatch(followed, call["input"])
    space = {"type": "namespace", "name": "n", "tools": [SHELL | {"format": {**form, "definition": "start: ("}}]}
    response = server.post(PATH, body | {"tools": [space], "tool_choice": "auto"})
    at = "tools[0].tools[0].format.definition"
    assert (response.status_code, response.json()["error"]["param"]) == (400, at), response.text


def test_a_tool_in_a_namespace_comes_back_with_it(server: HttpServer) -> None:
    space = {"type": "namespace", "name": "mcp__weather", "description": "Weather", "tools": [WEATHER]}
    choice = {"type": "function", "name": "get_weather", "namespace": "mcp__weather"}
    body = TOOLS | {"tools": [space], "tool_choice": choice}
    [call] = whole(server, body)["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__weather", "get_weather")
    asked = {"role": "user", "content": TOOLS["input"]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    assert whole(server, TOOLS | {"tools": [space], "input": [asked, call, output]})["output"]


def test_tools_of_other_servers_are_left_out_with_a_warning(server: HttpServer) -> None:
    tools = [{"type": "web_search"}, WEATHER, {"type": "image_generation", "size": "auto"}, {"type": "new", "x": 1}]
    response = server.post(PATH, TOOLS | {"tools": tools})
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["name"] == "get_weather"
    assert [tool["type"] for tool in response.json()["tools"]] == ["web_search", "function", "image_generation", "new"]
    warnings = response.headers["x-octavo-warnings"]
    assert all(f"'{kind}'" in warnings for kind in ("web_search", "image_generation", "new"))
    only = server.post(PATH, ASK | {"tools": [{"type": "web_search"}], "tool_choice": "auto"})
    assert text_of(only.json()) == text_of(whole(server, ASK))
    assert server.post(PATH, ASK | {"tool_choice": {"type": "web_search"}}).status_code == 200


def test_a_request_as_codex_sends_it(server: HttpServer) -> None:
    """Its twelve fields; two turns of it, the second with the thought, the call and the output of the first."""
    parts = [{"type": "input_text", "text": "What is the weather in Paris?"}]
    body: dict[str, Any] = {
        "model": "demo",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "role": "user", "content": parts},
        ],
        "tools": [WEATHER, SHELL, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    first = stream(server, body | {"temperature": 0})
    turn = [{name: value for name, value in item.items() if name not in ("status", "id")} for item in first["output"]]
    calls = [item for item in turn if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "21"} for call in calls]
    again = stream(server, body | {"temperature": 0, "input": [*body["input"], *turn, *outputs, QUESTION]})
    assert again["status"] in ("completed", "incomplete")
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 0.8 * first["usage"]["input_tokens"]


def test_a_probe_says_nothing(server: HttpServer) -> None:
    nothings: tuple[Any, ...] = ([], "", None)
    for nothing in nothings:
        assert whole(server, ASK | {"input": nothing, "max_output_tokens": 1})["output"]


def test_thoughts_are_items_of_their_own(server: HttpServer) -> None:
    thought, said = whole(server, THINKING)["output"]
    assert (thought["type"], said["type"]) == ("reasoning", "message")
    chat = {"messages": [{"role": "user", "content": SUM["input"]}], "thinking_token_budget": 10}
    expected = chat_of(server, chat | {"chat_template_kwargs": {"enable_thinking": True}})
    assert thought["content"] == [{"type": "reasoning_text", "text": expected["reasoning"]}]
    assert (thought["summary"], said["content"][0]["text"]) == ([], expected["content"])
    assert "encrypted_content" not in thought
    usage = whole(server, THINKING)["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] <= 11


def test_a_thought_goes_back_unread(server: HttpServer) -> None:
    asked = THINKING | {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    thought, said = whole(server, asked)["output"]
    assert "content" not in thought
    assert thought["summary"][0]["type"] == "summary_text"
    again = {"role": "user", "content": "Again?"}
    question = {"role": "user", "content": SUM["input"]}
    shown = whole(server, THINKING)["output"][0]
    stripped = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    counts = [
        whole(server, ASK | {"input": [question, each, said, again], "max_output_tokens": 1})["usage"]["input_tokens"]
        for each in (thought, stripped, shown)
    ]
    assert len(set(counts)) == 1
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    response = server.post(PATH, ASK | {"input": [question, foreign, said, again], "max_output_tokens": 1})
    assert "encrypted" in response.headers["x-octavo-warnings"]


def test_text_has_a_form(server: HttpServer) -> None:
    reply = whole(server, RECORD)
    assert json.loads(text_of(reply)).keys() == {"name", "age"}
    assert reply["text"]["format"]["name"] == "person"


def test_logprobs_are_those_of_the_text(server: HttpServer) -> None:
    reply = whole(server, THINKING | {"include": ["message.output_text.logprobs"], "top_logprobs": 2})
    [part] = reply["output"][-1]["content"]
    assert "".join(row["token"] for row in part["logprobs"]).strip() == part["text"].strip()
    assert all(len(row["top_logprobs"]) == 2 for row in part["logprobs"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, {**WEATHER, "parameters": {"type": "x"}}]}, "tools[1].parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [SHELL | {"format": {"type": "xml"}}]}, "tools[0].format.type"),
        ({"tools": [SHELL | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
        ({"tools": [SHELL | {"format": GRAMMAR | {"syntax": "ebnf"}}]}, "tools[0].format.syntax"),
        ({"tools": [SHELL | {"format": GRAMMAR | {"definition": "x" * 20_001}}]}, "tools[0].format.definition"),
        ({"tools": [SHELL | {"format": GRAMMAR | {"definition": "start: <x>"}}]}, "tools[0].format.definition"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": "x " * 5000}, "input"),
    ],
)
def test_errors_are_in_the_words_of_the_request(server: HttpServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(PATH, ASK | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert "messages" not in error["message"]


def test_the_path_works_without_its_version(server: HttpServer) -> None:
    assert server.post("/responses", ASK | {"max_output_tokens": 1}).status_code == 200
