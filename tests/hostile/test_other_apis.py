"""Every place of a request of every other API with values of every JSON type, and without it: never our fault."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.breadth import pick
from tests.hostile.wire import QUESTION
from tests.server.http_server import HttpServer

SAID = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: /a"/ LF\n%import common.LF'}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "demo", "max_tokens": 1, "system": SAID, "temperature": 1, "top_p": 1, "top_k": 5,
        "messages": [
            {"role": "user", "content": SAID},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"a": "b"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "i", "is_error": True, "content": SAID},
                {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
                {"type": "search_result", "source": "s", "title": "t", "content": SAID},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "context_management": {"edits": []},
    },
    "/v1/responses": {
        "model": "demo", "max_output_tokens": 1, "instructions": "i", "store": False,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}],
             "content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": "x"},
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "custom_tool_call", "name": "g", "call_id": "d", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
            {"type": "local_shell_call", "call_id": "e", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "e", "output": "x"},
        ],
        "tools": [
            {"type": "function", "strict": True, **FUNCTION},
            {"type": "custom", "name": "g", "format": GRAMMAR},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}, {"type": "web_search"},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"}, "top_logprobs": 1, "parallel_tool_calls": True, "truncation": "disabled",
        "previous_response_id": None, "background": False, "stream_options": {"include_obfuscation": False},
    },
    "/api/chat": {
        "model": "demo", "stream": False, "think": False, "format": SCHEMA, "keep_alive": -1,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "thinking": "t",
             "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "options": {"num_predict": 1, "temperature": 1, "stop": ["x"], "seed": 1, "num_ctx": 9}, "logprobs": True,
    },
    "/api/generate": {
        "model": "demo", "prompt": "a", "system": "s", "stream": False, "raw": False, "format": "json", "images": [],
        "options": {"num_predict": 1}, "context": [1], "keep_alive": "5m", "logprobs": True, "top_logprobs": 1,
    },
    "/api/embed": {"model": "demo", "input": ["a"], "truncate": True, "dimensions": 256, "options": {}},
    "/api/show": {"model": "demo", "verbose": True},
    "/v1/chat/completions/batch": {
        "messages": [QUESTION, QUESTION], "max_tokens": 1, "response_format": {"type": "text"},
    },
    "/v1/rerank": {"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True,
                   "max_tokens_per_doc": 5, "instruction": None},
    "/score": {"text_1": "a", "text_2": ["a", "b"], "instruction": None},
    "/pooling": {"input": ["a", "b"], "normalize": True, "dimensions": 256, "encoding_format": "float"},
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 256, "encoding_format": "base64"},
    "/v1/decisions": {
        "model": "demo", "input": "a", "prompt_cache_key": "k",
        "questions": [
            {"type": "predicate", "name": "p", "instructions": "a?"},
            {"type": "choice", "instructions": "b?", "choices": [{"value": "x", "description": "d"}, {"value": True}]},
            {"type": "score", "instructions": [{"type": "input_text", "text": "c?"}],
             "levels": [{"label": "1"}, {"label": "2"}]},
        ],
    },
    "/v1/systemone": {
        "state": {"a": 1}, "assets": {},
        "questions": {
            "p": {"type": "noul", "instructions": "a?", "criteria": {"true": "t"}},
            "c": {"type": "choice", "instructions": "b?", "criteria": {"x": "d", "y": "e"}},
            "s": {"type": "score", "instructions": "c?", "criteria": ["low", "high"]},
        },
    },
}  # fmt: skip
VALUES: list[Any] = [None, 2**64, [], {}, "", "\x00\ud800"]
VALUES += pick([], [True, -1, 1.5, 1e308, -(10**40), [None], [[]], {"a": None}, {"type": 3}, "x" * 300, ["a", 1]])
CHANGES: list[tuple[Any, ...]] = [(), *((value,) for value in VALUES)]  # with nothing, or another value
RAW = ["NaN", "-Infinity", "9" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 5000 + "]" * 5000, '"\\ud800"']


@pytest.fixture(scope="module", autouse=True)
def _all_are_right(server: HttpServer) -> None:
    """So that what is changed is what is wrong; and what is loaded on first use is there."""
    for path, body in ROUTES.items():
        response = server.post(path, body)
        assert response.status_code == 200, (path, response.text)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where there is something in a request."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(body: dict[str, Any], place: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """Return the request with another value at a place; without one, with nothing there."""
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    if value:
        inner[place[-1]] = value[0]
    else:
        del inner[place[-1]]
    return body


def judge(server: HttpServer, path: str, content: str) -> None:
    response = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, (content[:2000], response.text)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413, 422), (content[:2000], response.text)
        assert not any(inside in response.text for inside in ("Traceback", ".py", "object at 0x")), response.text
        assert response.json()["detail" if path == "/v1/systemone" else "error"], response.text


@pytest.mark.parametrize("path", ROUTES)
def test_every_place(server: HttpServer, path: str) -> None:
    body = ROUTES[path]
    for number, place in enumerate(places(body)):
        for value in pick([CHANGES[number % len(CHANGES)]], CHANGES):
            if place[0] != "options" or value != ():  # whose limit saves minutes
                judge(server, path, json.dumps(changed(body, place, *value)))


@pytest.mark.parametrize("path", ROUTES)
def test_what_no_json_library_would_write(server: HttpServer, path: str) -> None:
    body = ROUTES[path]
    for number, name in enumerate(body):
        for raw in pick([RAW[number % len(RAW)]], RAW):
            twice = json.dumps(body)[:-1] + f', "{name}": {raw}}}'  # also the same key twice
            judge(server, path, twice)
