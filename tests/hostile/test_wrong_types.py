"""Every field of every request with values of every JSON type, made from the wire types themselves.

What the type refuses must be a 400 that names the field; what it accepts may be refused for its value, and must not be
our fault.
"""

import json
from typing import Any

import msgspec
import pytest
from tests.hostile.wire import CHAT, QUESTION, TEXT, refusal
from tests.server.http_server import HttpServer

from octavo.server.openai import protocol

VALUES: list[Any] = [
    True, 0, -1, 1.5, 2**31, -(2**63), 2**64, 10**40, 1e308, "", "x", "\x00", "é" * 50, [], [None], [[]], [0], [-1],
    ["a", 1], [{}], {}, {"a": None}, {"0": 1}, {"type": "text"}, {"type": "json_schema"}, {"type": 3},
]  # fmt: skip
ROUTES: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    (CHAT, protocol.ChatCompletionRequest, {"messages": QUESTION, "max_tokens": 1, "max_completion_tokens": 1}),
    (TEXT, protocol.CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    ("/tokenize", protocol.TokenizeRequest, {"prompt": "a"}),
    ("/detokenize", protocol.DetokenizeRequest, {"tokens": [1]}),
]
NESTED: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("messages", protocol.ChatMessage, {"role": "user", "content": "a"}),
    ("tools", protocol.ToolDefinition, {"type": "function", "function": {"name": "f"}}),
]
NAMES = [(path, kind, base, field.name) for path, kind, base in ROUTES for field in msgspec.structs.fields(kind)]
NESTED_NAMES = [
    (list_, kind, base, field.name) for list_, kind, base in NESTED for field in msgspec.structs.fields(kind)
]


def is_of_type(kind: type[msgspec.Struct], body: dict[str, Any]) -> bool:
    try:
        msgspec.json.decode(json.dumps(body).encode(), type=kind)
    except msgspec.DecodeError:
        return False
    return True


def judge(server: HttpServer, path: str, body: dict[str, Any], *, is_wrong: bool, place: str) -> None:
    response = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if response.status_code == 200 and not is_wrong:
        return
    wanted = 404 if place == "model" and not is_wrong else 400
    error = refusal(response.status_code, response.content, wanted)
    if is_wrong:
        assert str(error["param"]).startswith(place), error


@pytest.mark.parametrize(("path", "kind", "base", "name"), NAMES)
def test_a_field(server: HttpServer, path: str, kind: type[msgspec.Struct], base: dict[str, Any], name: str) -> None:
    for value in VALUES:
        body = {**base, name: value}
        judge(server, path, body, is_wrong=not is_of_type(kind, body), place=name)


@pytest.mark.parametrize(("list_", "kind", "base", "name"), NESTED_NAMES)
def test_a_field_inside_a_list(
    server: HttpServer, list_: str, kind: type[msgspec.Struct], base: dict[str, Any], name: str
) -> None:
    for value in VALUES:
        item = {**base, name: value}
        body = {"messages": QUESTION, "max_tokens": 1, list_: [item]}
        judge(server, CHAT, body, is_wrong=not is_of_type(kind, item), place=f"{list_}[0]")


@pytest.mark.parametrize("path", [path for path, _, _ in ROUTES])
@pytest.mark.parametrize("body", [None, True, 0, 1.5, "text", [], [{}], {}])
def test_a_body_that_is_no_request(server: HttpServer, path: str, body: object) -> None:
    response = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    refusal(response.status_code, response.content, 400)
