"""Anthropic's Messages API over real HTTP, with the demo model: whole and streamed, tools, thoughts, counts, errors."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.http_server import HttpServer
from tests.server.messages_client import (
    PATH,
    count,
    events_of,
    message_of,
    num_prompt_tokens,
    stream,
    whole,
    without_id,
)

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is a block?"}
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": [QUESTION], "temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city", "input_schema": CITY}
NOW = {"name": "now", "type": "custom", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
TOOLS = ASK | {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [WEATHER]}
SUM = ASK | {"messages": [{"role": "user", "content": "What is 123 + 456?"}], "max_tokens": 200}
THINKING = SUM | {"thinking": {"type": "enabled", "budget_tokens": 10}}


def chat_of(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(CHAT, {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def text(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": kind, **fields}


@pytest.mark.parametrize(
    "body",
    [
        ASK,
        ASK | {"max_tokens": 3},
        ASK | {"stop_sequences": ["memory"]},
        TOOLS,
        TOOLS | {"tools": [WEATHER, NOW], "tool_choice": {"type": "tool", "name": "now"}},
        TOOLS | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        THINKING,
        THINKING | {"thinking": {"type": "adaptive", "display": "omitted"}},
        THINKING | {"tools": [NOW], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ASK | {"max_tokens": 100_000},
    ],
)
def test_a_stream_makes_the_same_message(server: HttpServer, body: dict[str, Any]) -> None:
    assert without_id(stream(server, body)) == without_id(whole(server, body))


def test_a_message_is_the_chat_of_the_same_conversation(server: HttpServer) -> None:
    reply = whole(server, ASK | {"system": "You are kind."})
    system = {"role": "system", "content": "You are kind."}
    assert reply["content"] == [text(chat_of(server, {"messages": [system, QUESTION]})["content"])]
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "demo")
    assert reply["id"].startswith("msg_")
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    assert num_prompt_tokens(reply) == count(server, ASK | {"system": "You are kind."})
    assert reply["usage"]["output_tokens"] > 3


def test_why_a_message_ends(server: HttpServer) -> None:
    assert whole(server, ASK | {"max_tokens": 3})["stop_reason"] == "max_tokens"
    stopped = whole(server, ASK | {"stop_sequences": ["no such", " memory"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " memory")
    assert " memory" not in stopped["content"][0]["text"]
    full = whole(server, ASK | {"max_tokens": 5000, "messages": [{"role": "user", "content": "x " * 1980}]})
    assert full["stop_reason"] in ("end_turn", "model_context_window_exceeded")


def test_a_tool_is_called_and_its_result_goes_back(server: HttpServer) -> None:
    reply = whole(server, TOOLS)
    [block] = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert reply["stop_reason"] == "tool_use"
    sunny = '{"temperature": 21, "sky": "sunny"}'
    for content in (sunny, [text(sunny)]):
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": content}
        turns = [*TOOLS["messages"], {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        told = whole(server, TOOLS | {"messages": turns})
        assert "21" in told["content"][0]["text"]
        assert told["stop_reason"] == "end_turn"
        assert num_prompt_tokens(told) == count(server, TOOLS | {"messages": turns})
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    chat = [
        *TOOLS["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": sunny},
    ]
    tool = {"type": "function", "function": {"name": "get_weather", "description": WEATHER["description"]}}
    tool["function"]["parameters"] = CITY  # type: ignore[index]
    assert told["content"] == [text(chat_of(server, {"messages": chat, "tools": [tool]})["content"])]


def test_a_call_that_is_cut_off_says_so(server: HttpServer) -> None:
    reply = whole(server, TOOLS | {"max_tokens": 12})
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][0]["name"] == "get_weather"
    assert all(name == "INVALID_JSON" for name in reply["content"][0]["input"])


def test_thoughts_come_first_and_only_when_asked_for(server: HttpServer) -> None:
    thought, said = whole(server, THINKING)["content"]
    assert (thought["type"], said["type"]) == ("thinking", "text")
    assert thought["thinking"]
    assert thought["signature"]
    assert "think>" not in said["text"]
    chat = {"messages": SUM["messages"], "chat_template_kwargs": {"enable_thinking": True}}
    expected = chat_of(server, chat | {"thinking_token_budget": 10})
    assert (thought["thinking"], said["text"]) == (expected["reasoning"], expected["content"])
    kinds = [event["type"] for event in stream_events(server, THINKING)]
    assert kinds.index("content_block_stop") < len(kinds) - 1 - kinds[::-1].index("content_block_start")
    usage = whole(server, THINKING)["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] <= 11
    omitted, same = whole(server, THINKING | {"thinking": {"type": "adaptive", "display": "omitted"}})["content"]
    assert (omitted["thinking"], bool(omitted["signature"])) == ("", True)
    assert same["type"] == "text"
    for off in ({}, {"thinking": {"type": "disabled"}}, {"thinking": None}):
        assert [block["type"] for block in whole(server, SUM | off)["content"]] == ["text"]


def stream_events(server: HttpServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of(server.post(PATH, body | {"stream": True}).text)


def test_a_thought_goes_back_with_its_signature(server: HttpServer) -> None:
    reply = whole(server, THINKING)
    turns = [*SUM["messages"], {"role": "assistant", "content": reply["content"]}, QUESTION]
    redacted = {"type": "redacted_thinking", "data": "x"}
    told = whole(server, THINKING | {"messages": turns})
    assert told["content"][-1]["type"] == "text"
    turns[1] = {"role": "assistant", "content": [redacted, *reply["content"]]}
    assert count(server, THINKING | {"messages": turns}) == num_prompt_tokens(told)


def test_an_answer_is_continued(server: HttpServer) -> None:
    begun = {"role": "assistant", "content": "A block is a piece"}
    reply = whole(server, ASK | {"messages": [QUESTION, begun]})
    assert reply["content"][0]["text"].startswith(" of memory")
    assert num_prompt_tokens(reply) == count(server, ASK | {"messages": [QUESTION, begun]})
    blank = {"role": "assistant", "content": [text(" ")]}
    assert whole(server, ASK | {"messages": [QUESTION, blank]})["content"] == whole(server, ASK)["content"]


def test_a_form_is_kept(server: HttpServer) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert whole(server, ASK | fields)["content"][0]["text"] in ('"yes"', '"no"')


def test_what_changes_with_every_request_of_claude_code_is_no_part_of_the_prompt(server: HttpServer) -> None:
    """So that the second of two turns finds nearly all of the first in the cache."""

    def turn(line: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        header = text(f"x-anthropic-billing-header: cc_version=2.1.36; cch={line:08x};")
        rules = text("You are a tool for programmers. " * 70, cache_control={"type": "ephemeral", "ttl": "1h"})
        return ASK | {"system": [header, rules], "messages": messages, "tools": [WEATHER, NOW], "max_tokens": 8}

    first = whole(server, turn(1, [QUESTION]))
    said = {"role": "assistant", "content": first["content"]}
    second = whole(server, turn(2, [QUESTION, said, {"role": "user", "content": [text("And?", cache_control=None)]}]))
    assert second["usage"]["cache_read_input_tokens"] >= 0.95 * num_prompt_tokens(first)
    alone = turn(3, [QUESTION])
    assert count(server, alone) == count(server, alone | {"system": alone["system"][1:]}) == num_prompt_tokens(first)


def test_a_later_system_message_costs_nothing_of_the_cache(server: HttpServer) -> None:
    asked = ASK | {"system": "You are a tool for programmers. " * 70, "messages": [QUESTION], "max_tokens": 8}
    first = whole(server, asked)
    said = [QUESTION, {"role": "assistant", "content": first["content"]}]
    late = [{"role": "system", "content": "A file was opened."}, {"role": "user", "content": "And?"}]
    second = whole(server, asked | {"messages": [*said, *late]})
    assert second["usage"]["cache_read_input_tokens"] >= 0.95 * num_prompt_tokens(first)
    joined = {"role": "user", "content": "A file was opened.\n\nAnd?"}
    assert count(server, asked | {"messages": [*said, joined]}) == num_prompt_tokens(second)


@pytest.fixture(scope="module")
def fake() -> Iterator[HttpServer]:
    """A server with options, without a model."""
    options = ("--keep-billing-header", "--model-alias", "claude-*=demo", "--model-alias", "fast=demo")
    with HttpServer(*options, "--api-key", "k", "--resume-s", "60", has_model=False) as running:
        running.client.headers["x-api-key"] = "k"
        yield running


def test_the_billing_header_may_be_kept(fake: HttpServer) -> None:
    header = "x-anthropic-billing-header: cch=1;"
    assert count(fake, ASK | {"system": header}) > count(fake, ASK) + 10
    assert count(fake, ASK | {"system": [text(header)]}) == count(fake, ASK | {"system": header})


def test_aliases_and_paths_lead_to_the_model(fake: HttpServer) -> None:
    for name in ("claude-haiku-4-5-20251001", "Claude-Opus", "fast", "demo", None):
        assert whole(fake, ASK | {"model": name, "max_tokens": 1})["model"] == "demo"
        chat = fake.post(CHAT, {"model": name, "messages": [QUESTION], "max_tokens": 1})
        assert chat.status_code == 200, chat.text
    assert fake.post(PATH, ASK | {"model": "slow"}).status_code == 404
    for path in ("/messages", "//v1/messages/"):
        assert fake.post(path, ASK | {"max_tokens": 1}).status_code == 200
    assert fake.post("/messages/count_tokens", ASK).json() == {"input_tokens": count(fake, ASK)}


def test_keys_are_taken_as_its_clients_send_them(fake: HttpServer) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": ""}
    for key, status in (("Bearer k", 200), ("Bearer x", 401)):
        sent = fake.client.post(
            PATH + "?beta=true", json=ASK | {"max_tokens": 1}, headers=headers | {"authorization": key}
        )
        assert sent.status_code == status
        assert sent.headers["request-id"] == sent.headers["x-request-id"]
    error = sent.json()
    assert error == {"type": "error", "error": {"type": "authentication_error", "message": "The API key is not valid."}}


def test_a_stream_is_resumed_and_a_request_is_answered_once(fake: HttpServer) -> None:
    body = ASK | {"max_tokens": 20, "stream": True, "temperature": 1}
    with fake.client.stream("POST", PATH, json=body) as response:
        frames: list[str] = []
        for line in response.iter_lines():
            frames.append(line)
            if line.startswith("id: ") and line.endswith(":5"):
                break
    name = frames[-1].removeprefix("id: ")
    begun = "\n".join(frames[:-1]) + "\n"
    path = "/v1/streams/" + name.partition(":")[0]
    all_of_it = fake.client.get(path).text
    assert all_of_it.startswith(begun)
    rest = fake.client.post(PATH, json=body, headers={"Last-Event-ID": name})
    assert all_of_it.endswith(rest.text)
    assert len(events_of(all_of_it)) == len(events_of(rest.text)) + 5
    assert message_of(events_of(all_of_it))["usage"]["output_tokens"] == 20
    key = {"Idempotency-Key": "once"}
    answers = [fake.client.post(PATH, json=body | {"stream": False}, headers=key).text for _ in range(2)]
    assert answers[0] == answers[1]


def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    body, headers = ASK | {"max_tokens": 2000, "stream": True}, {"X-Request-Timeout": "0.6"}
    with HttpServer("--seed", "1", has_model=False) as fake:  # or chance may end the answer before its deadline
        events = events_of(fake.client.post(PATH, json=body, headers=headers).text)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens=0"),
        ({"messages": []}, 400, "messages: at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": ""}]}, 400, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, 400,
         "messages[0]: the conversation ends in a tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 3}]}]},
         400, "messages[0].content[0].input"),
        ({"system": [{"type": "image"}]}, 400, "system[0].type"),
        ({"tools": [{"description": "x"}]}, 400, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, 400, "Two tools"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object", "minProperties": "x"}}],
          "tool_choice": {"type": "any"}}, 400, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
        ({"thinking": {"type": "hard"}}, 400, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, 400, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, 400, "thinking.display"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format.schema"),
        ({"temperature": 9}, 400, "temperature"),
        ({"stop_sequences": ["x"] * 65}, 400, "stop_sequences="),
        ({"model": "other"}, 404, "does not exist"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "prompt is too long: "),
        ({"system": "x", "messages": [QUESTION, {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]},
         400, "accepts only text"),
    ],
)  # fmt: skip
def test_what_is_refused(server: HttpServer, fields: dict[str, Any], status: int, words: str) -> None:
    for body in (ASK | fields, ASK | fields | {"stream": True}):
        response = server.post(PATH, body)
        assert response.status_code == status, response.text
        error = response.json()
        assert set(error) == {"type", "error"}
        assert error["type"] == "error"
        assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        assert words in error["error"]["message"]


def test_routes_that_do_not_exist_answer_in_its_shape_too(server: HttpServer) -> None:
    for method, path, status in (("GET", PATH, 405), ("POST", f"{PATH}/batches", 404), ("PUT", PATH, 405)):
        response = server.client.request(method, path, json={})
        assert (response.status_code, response.json()["type"]) == (status, "error")


def test_what_has_no_effect_is_named(server: HttpServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = ASK | {"tools": [search], "mcp_servers": [{"name": "x"}], "colour": 1, "output_config": {"effort": "low"}}
    response = server.post(PATH, body | {"max_tokens": 1, "metadata": {"user_id": "u"}, "cache_control": {}})
    assert response.status_code == 200, response.text
    warnings = response.headers["x-octavo-warnings"]
    for words in ("web_search_20250305", "mcp_servers", "'colour'", "output_config.effort"):
        assert words in warnings
    assert "metadata" not in warnings
    assert "cache_control" not in warnings
