"""Requests that schemathesis makes from our own OpenAPI page: right ones, wrong ones, and what lies between."""

from itertools import chain
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.breadth import pick
from tests.hostile.wire import refusal
from tests.server.http_server import HttpServer

NUM_EXAMPLES = pick(25, 120)  # of each route, right and wrong ones each

# Tokens are what costs time, and a right request may ask for all that the context holds.
CAPS = {"max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 0, "n": 1, "best_of": 1}
# What types cannot say: with any text in their places nearly all requests would end at the first of these checks.
KNOWN: dict[str, Any] = {
    "model": None, "temperature": 1, "top_p": 1, "min_p": 0, "top_k": 5, "timeout": 30, "allowed_token_ids": None,
    "repetition_penalty": 1, "presence_penalty": 1, "frequency_penalty": 1, "stop": "x", "bad_words": None,
    "response_format": {"type": "json_object"}, "structured_outputs": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "stream_options": None, "suffix": None, "seed": 1,
}  # fmt: skip
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"), ("POST", "/v1/batches"), ("POST", "/v1/embeddings"), ("GET", "/v1/files/{file_id}"),
    ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/embed"), ("POST", "/api/embeddings"),
    ("POST", "/api/show"), ("POST", "/api/pull"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"), ("POST", "/v1/responses/input_tokens"), ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/rerank"), ("POST", "/score"), ("POST", "/pooling"), ("POST", "/v1/decisions"),
    ("POST", "/v1/chat/completions/batch"),
]  # fmt: skip


@pytest.fixture(scope="module")
def api(server: HttpServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def mended_blocks(body: dict[str, Any]) -> dict[str, Any]:
    """The same for Anthropic's routes."""
    mended = {**body, "max_tokens": 2, "model": None, "temperature": 1, "top_p": 1, "top_k": 5, "output_config": None}
    mended = {name: value for name, value in mended.items() if name in body}
    for number, message in enumerate(mended.get("messages") or []):
        message["role"] = message["role"] if message["role"] == "assistant" else "user"
        if isinstance(message["content"], list):
            for block in message["content"]:
                kinds = ("text", "thinking", "tool_use") if message["role"] == "assistant" else ("text", "tool_result")
                block |= {"type": kinds[number % len(kinds)], "text": "x", "id": "i", "name": "n", "tool_use_id": "i"}
                block["input"] = block.get("input") if isinstance(block.get("input"), dict) else {}
    if mended.get("messages"):
        mended["messages"].append({"role": "user", "content": "x"})
    return mended


ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": "x"}, {"type": "reasoning", "summary": []},
    {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "custom_tool_call", "name": "f", "call_id": "d", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "x"}, {"type": "web_search_call", "id": "w"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
]  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f"}, {"type": "custom", "name": "g"}, {"type": "web_search"},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
]  # fmt: skip


def mended_items(body: dict[str, Any]) -> dict[str, Any]:
    """The same for the Responses API, whose items and tools have no types on the page."""
    calm: dict[str, Any] = {
        **KNOWN, "max_output_tokens": 2, "min_tokens": 0, "previous_response_id": None, "conversation": None,
        "prompt": None, "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": None, "top_logprobs": None,
        "instructions": "x", "background": None, "thinking_token_budget": None, "priority": 0,
    }  # fmt: skip
    mended = {**body, **{name: value for name, value in calm.items() if name in body}, "max_output_tokens": 2}
    for field, sound in (("input", ITEMS), ("tools", TOOLS)):
        if isinstance(mended.get(field), list):
            mended[field] = [{**each, **sound[number % len(sound)]} for number, each in enumerate(mended[field])]
    if isinstance(mended.get("tools"), list):
        mended["tools"] = mended["tools"][: len(TOOLS)]
    return mended


def mended(body: dict[str, Any], path: str) -> dict[str, Any]:
    """A request with sound values where a wrong one would hide all others; every other one is left in part as it is."""
    known = {name: value for name, value in KNOWN.items() if name in body and len(str(body)) % 4}
    mended = {**body, **known} | (CAPS if path.startswith("/v1") else {})
    if path in ("/api/chat", "/api/generate"):
        given = mended.get("options")
        mended |= {
            "options": {**(given if isinstance(given, dict) else {}), "num_predict": 2},
            "format": None,
            "think": None,
            "template": None,
        }
    conversation = mended.get("messages") or []
    for message in chain.from_iterable(each if isinstance(each, list) else [each] for each in conversation):
        message["role"] = message["role"] if message["role"] in ("assistant", "tool") else "user"
        message["content"] = message.get("content") or "x"
        for part in message["content"]:
            if isinstance(part, dict):
                part |= {"type": "text", "text": "x"}
    if mended.get("messages") == []:
        mended["messages"] = [{"role": "user", "content": "x"}]
    if path == "/tokenize":
        mended |= {"prompt": None} if mended.get("messages") is not None else {"prompt": "x"}
    if isinstance(mended.get("tokens"), list):
        mended["tokens"] = [token % 2048 for token in mended["tokens"]]
    if isinstance(mended.get("prompt"), list):
        mended["prompt"] = [part % 2048 for part in mended["prompt"] if isinstance(part, int)] or "text"
    return mended


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_is_our_fault(api: Any, method: str, path: str, mode: Any) -> None:
    operation = api[path][method]
    if mode == schemathesis.GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("any text is a name")

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode.is_positive and isinstance(case.body, dict):
            is_of_items = path.startswith("/v1/responses")
            is_of_blocks = path.startswith("/v1/messages")
            case.body = (
                mended_items(case.body) if is_of_items
                else mended_blocks(case.body) if is_of_blocks
                else mended(case.body, path)
            )  # fmt: skip
        response = case.call(timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            if path.startswith("/api/"):
                assert response.json().keys() == {"error"}
            elif path.startswith("/v1/messages"):
                assert response.json().keys() == {"type", "error"}
            else:
                refusal(response.status_code, response.content, response.status_code)

    send()
