"""Reasoning over real HTTP, with the demo model: apart from the answer, counted, and no longer than asked for."""

from typing import Any

import pytest
from tests.server.http_server import HttpServer
from tests.server.test_tools import NOW, PATH, put_together

QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]
THINKING: dict[str, Any] = {
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 200,
    "chat_template_kwargs": {"enable_thinking": True},
}


def whole(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, THINKING | fields)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_thoughts_are_apart_from_the_answer(server: HttpServer) -> None:
    reply = whole(server, thinking_token_budget=10)
    message = reply["choices"][0]["message"]
    assert message["reasoning"]
    assert message["reasoning"] == message["reasoning_content"]
    assert "think>" not in message["content"]
    assert 0 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 11


def test_a_stream_says_the_same(server: HttpServer) -> None:
    reply = whole(server, thinking_token_budget=10)
    chunks = server.stream(PATH, THINKING | {"thinking_token_budget": 10, "stream_options": {"include_usage": True}})
    message = put_together(chunks)
    assert message["reasoning"] == reply["choices"][0]["message"]["reasoning"]
    assert message["content"] == reply["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == reply["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_is_kept_to_the_token(server: HttpServer, budget: int) -> None:
    wild = {"temperature": 1.5, "seed": 3, "n": 4, "thinking_token_budget": budget, "max_tokens": 40}
    reply = whole(server, **wild)
    used = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 4 <= used <= 4 * (budget + 1)
    for choice in reply["choices"]:
        assert bool(choice["message"].get("reasoning")) <= (budget > 0)


def test_effort_switches_thinking_on_and_off(server: HttpServer) -> None:
    plain = {"chat_template_kwargs": None, "max_tokens": 30}
    on = whole(server, reasoning_effort="low", **plain)
    off = whole(server, reasoning_effort="none", **plain)
    assert on["usage"]["prompt_tokens"] > off["usage"]["prompt_tokens"]
    assert "reasoning" not in off["choices"][0]["message"]
    assert off["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_without_thinking_the_form_is_the_answer(server: HttpServer) -> None:
    for off in (
        {"reasoning_effort": "none", "chat_template_kwargs": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        reply = whole(server, max_tokens=10, guided_choice=["<think> no"], **off)
        message = reply["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == ("<think> no", False)
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thoughts_can_be_left_out(server: HttpServer) -> None:
    shown = whole(server, thinking_token_budget=5)
    hidden = whole(server, thinking_token_budget=5, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == shown["choices"][0]["message"]["content"]
    assert hidden["usage"]["completion_tokens"] == shown["usage"]["completion_tokens"]


def test_thoughts_come_before_a_form_and_before_forced_calls(server: HttpServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    answer = whole(server, thinking_token_budget=6, response_format=schema)["choices"][0]["message"]
    assert answer["reasoning"]
    assert answer["content"] in ('"yes"', '"no"')
    forced = whole(server, thinking_token_budget=6, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    message = forced["choices"][0]["message"]
    assert message["reasoning"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_stop_strings_end_the_answer_and_not_the_thought(server: HttpServer) -> None:
    """Nor a call: the string is searched for in what the client reads as content, in the same way in a stream."""
    plain = whole(server, thinking_token_budget=10)["choices"][0]
    thought, content = plain["message"]["reasoning"], plain["message"]["content"]
    within = thought[2:6]
    assert within not in content
    assert whole(server, thinking_token_budget=10, stop=[within])["choices"][0] == plain
    stop = content[-6:-3]
    for include in (False, True):
        fields = {"stop": [stop], "include_stop_str_in_output": include, "logprobs": True, "n": 2}
        reply = whole(server, thinking_token_budget=10, **fields)
        ended = reply["choices"][1]
        kept = content[: content.index(stop) + (len(stop) if include else 0)]
        assert (ended["message"]["reasoning"], ended["message"]["content"]) == (thought, kept)
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
        chunks = server.stream(PATH, THINKING | fields | {"thinking_token_budget": 10})
        streamed = put_together(chunks, 1)
        assert (streamed["reasoning"], streamed["content"]) == (thought, kept)
        text = b"".join(bytes(row["bytes"]) for row in ended["logprobs"]["content"]).decode()
        assert kept in text
    forced = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False, "stop": ["now", "<tool_call>"]}
    choice = whole(server, thinking_token_budget=3, **forced)["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert choice["finish_reason"] == "tool_calls"


def continued(server: HttpServer, final: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rest of a message that the request begins, whole and put together from a stream."""
    body = {
        "messages": [*QUESTION, {"role": "assistant", **final}],
        "continue_final_message": True,
        "chat_template_kwargs": None,
        **fields,
    }
    reply = whole(server, **body)
    message = put_together(server.stream(PATH, THINKING | body))
    answer = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (answer.get("reasoning", ""), answer["content"])
    return answer, reply["usage"]


def test_a_thought_that_is_continued_stays_a_thought(server: HttpServer) -> None:
    """With its budget, and the form after it; a thought that is closed is not opened again."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}}
    thought = "We add the digits"
    for final in ({"content": f"<think>\n{thought}"}, {"content": None, "reasoning": thought}):
        answer, usage = continued(server, final, thinking_token_budget=6, **form)
        assert answer["reasoning"]
        assert answer["content"] in ('"yes"', '"no"')
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= 7
    for final in (
        {"content": f"<think>\n{thought}</think>\n\n"},
        {"content": f"<think>\n{thought}</think>\n\nThe sum"},
        {"content": "The sum", "reasoning_content": thought},
    ):
        answer, usage = continued(server, final, **form)
        assert answer["content"] in ('"yes"', '"no"')
        assert "reasoning" not in answer
    told = [*QUESTION, {"role": "assistant", "content": f"<think>{thought}"}]
    ended = whole(server, messages=told, add_generation_prompt=False, chat_template_kwargs=None, max_tokens=3)
    assert "reasoning" not in ended["choices"][0]["message"]  # the demo's template ends every message


def test_a_conversation_has_one_rendering(server: HttpServer) -> None:
    """`/tokenize` counts what a chat counts, whatever is in the request."""
    plain: dict[str, Any] = {"messages": QUESTION}
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    described = {"type": "function", "function": {"name": "f", "description": "F", "strict": True}}
    for fields in (
        {},
        {"tools": [NOW, described]},
        {"tools": [NOW], "tool_choice": "none"},
        {"tools": [NOW], "messages": called},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"add_generation_prompt": False},
        {"messages": [*QUESTION, {"role": "assistant", "reasoning": "Well"}], "continue_final_message": True},
        {"truncate_prompt_tokens": 5},
    ):
        counted = server.post("/tokenize", plain | fields).json()["count"]
        reply = server.post(PATH, plain | fields | {"max_tokens": 1}).json()
        assert counted == reply["usage"]["prompt_tokens"], fields
