"""Small requests that ask for endless work: each is refused, or bounded, and nobody else notices."""

import json
from typing import Any

import pytest
from tests.hostile.wire import CHAT, QUESTION, SMALL, TEXT, refusal
from tests.server.http_server import HttpServer

NESTED: dict[str, Any] = {"type": "object"}
for _ in range(60):
    NESTED = {"type": "object", "properties": {"a": NESTED, "b": NESTED}, "required": ["a", "b"]}

SCHEMAS: dict[str, Any] = {
    "minItems 1e9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "minLength 1e9": {"type": "string", "minLength": 10**9},
    "nested ranges": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "2^60 properties": NESTED,
    "refers to itself": {"$ref": "#"},
    "refers elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "an unknown type": {"type": "colour"},
    "impossible": {"type": "string", "enum": []},
}
PATTERNS = ["(a+)+$", "(a|a)*b", "a{1000000000}", "(" * 5000, "[", "(?=x)", "((a{0,500}){0,500}){0,500}", "\\1"]


def ask(server: HttpServer, fields: dict[str, Any]) -> int:
    """Send a request that may be answered or refused, but not take for ever or be our fault."""
    response = server.post(CHAT, {"messages": QUESTION, "max_tokens": 20, **fields})
    if response.status_code == 200:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
        return 200
    refusal(response.status_code, response.content, 400)
    return 400


def neighbor(server: HttpServer) -> str:
    return str(server.post(CHAT, SMALL).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_schemas(server: HttpServer, name: str) -> None:
    before = neighbor(server)
    schema = SCHEMAS[name]
    if name == "2^60 properties":  # as text it is small only where parts are shared: cut it to what a body holds
        schema = {"type": "object", "properties": {"a": json.loads('{"anyOf": [' * 40 + "true" + "]}" * 40)}}
    ask(server, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    assert neighbor(server) == before


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(server: HttpServer, pattern: str) -> None:
    before = neighbor(server)
    ask(server, {"structured_outputs": {"regex": pattern}})
    ask(server, {"guided_regex": pattern})
    assert neighbor(server) == before


@pytest.mark.parametrize("grammar", ["", "start: start", "start: (" * 500, "root ::= root root", "%import python"])
def test_grammars(server: HttpServer, grammar: str) -> None:
    ask(server, {"structured_outputs": {"grammar": grammar}})


def test_many_choices(server: HttpServer) -> None:
    ask(server, {"structured_outputs": {"choice": [f"choice {number}" for number in range(20_000)]}})
    assert ask(server, {"structured_outputs": {"choice": []}}) == 400


@pytest.mark.parametrize(
    "template", ["{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{ 'a' * 10**9 }}", "hello"]
)
def test_a_template_in_a_request_is_refused(server: HttpServer, template: str) -> None:
    response = server.post(CHAT, {**SMALL, "chat_template": template})
    assert refusal(response.status_code, response.content, 400)["param"] == "chat_template"


@pytest.mark.parametrize(
    "kwargs", [{"messages": []}, {"tools": 5}, {"x": "y" * 500_000}, {"range": 1, "raise_exception": 2}, {"": 0}]
)
def test_template_arguments(server: HttpServer, kwargs: dict[str, Any]) -> None:
    response = server.post(CHAT, {**SMALL, "chat_template_kwargs": kwargs})
    assert response.status_code == 200 or refusal(response.status_code, response.content, 400)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 10**6}, "n"),
        (CHAT, {"max_tokens": 10**9, "min_tokens": 10**9}, "m"),
        (CHAT, {"stop": ["x"] * 10_000}, "stop"),
        (CHAT, {"stop": ["x" * 5_000]}, "stop"),
        (CHAT, {"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
        (CHAT, {"logit_bias": {str(number): 1 for number in range(50_000)}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 1e308}}, "logit_bias"),
        (CHAT, {"allowed_token_ids": list(range(50_000))}, "allowed_token_ids"),
        (CHAT, {"stop_token_ids": [10**9]}, "stop_token_ids"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}, ""),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 100_000}]}, ""),
        (TEXT, {"prompt": ["a"] * 5000}, "prompt"),
        (TEXT, {"prompt": [[1] * 3000]}, ""),
        (TEXT, {"prompt": [10**9]}, "prompt"),
        (TEXT, {"prompt": "a", "best_of": 10**6}, "best_of"),
    ],
)
def test_too_much_of_everything(server: HttpServer, path: str, fields: dict[str, Any], param: str) -> None:
    base = {"max_tokens": 1, "temperature": 0, **({"messages": QUESTION} if path == CHAT else {})}
    response = server.post(path, {**base, **fields})
    error = refusal(response.status_code, response.content, 400)
    assert str(error["param"] or "").startswith(param)
