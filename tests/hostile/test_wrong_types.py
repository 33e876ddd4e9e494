"""Every field of every request with values of every JSON type, made from the wire types themselves.

What the type refuses must be a 400 that names the field; what it accepts may be refused for its value, and must not be
our fault.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.breadth import each, pick
from tests.hostile.wire import CHAT, QUESTION, TEXT, refusal
from tests.server.http_server import HttpServer

from octavo.server.openai import protocol

VALUES: list[Any] = [True, -1, 1.5, 2**64, "\x00", [], [None], [{}], {"type": 3}]
VALUES += pick([], ["", {}, 1e308, [0], {"a": None}])
VALUES += pick([], [0, 2**31, -(2**63), 10**40, "x", "é" * 50, [[]], [-1], ["a", 1], {"0": 1}])
VALUES += pick([], [{"type": "text"}, {"type": "json_schema"}])
ROUTES: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    (CHAT, protocol.ChatCompletionRequest, {"messages": QUESTION, "max_tokens": 1, "max_completion_tokens": 1}),
    (TEXT, protocol.CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    ("/tokenize", protocol.TokenizeRequest, {"prompt": "a"}),
    ("/detokenize", protocol.DetokenizeRequest, {"tokens": [1]}),
]
# Where it stands in a request, with a stand-in for the struct; the struct; one that is right.
Wrap = Callable[[dict[str, Any]], dict[str, Any]]
NESTED: list[tuple[str, Wrap, type[msgspec.Struct], dict[str, Any]]] = [
    ("messages[0]", lambda it: {"messages": [it]}, protocol.ChatMessage, {"role": "user", "content": "a"}),
    ("messages[0].content[0]", lambda it: {"messages": [{"role": "user", "content": [it]}]}, protocol.ContentPart,
     {"type": "text", "text": "a"}),
    ("messages[1].tool_calls[0]",
     lambda it: {"messages": [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [it]}]},
     protocol.ToolCall, {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}),
    ("tools[0]", lambda it: {"tools": [it]}, protocol.ToolDefinition, {"type": "function", "function": {"name": "f"}}),
    ("tools[0].function", lambda it: {"tools": [{"type": "function", "function": it}]}, protocol.FunctionDefinition,
     {"name": "f", "parameters": {}}),
    ("stream_options", lambda it: {"stream_options": it}, protocol.StreamOptions, {}),
    ("response_format", lambda it: {"response_format": it}, protocol.ResponseFormat, {"type": "json_object"}),
    ("response_format.json_schema", lambda it: {"response_format": {"type": "json_schema", "json_schema": it}},
     protocol.JsonSchemaFormat, {"name": "x", "schema": {}}),
    ("structured_outputs", lambda it: {"structured_outputs": it}, protocol.StructuredOutputs, {}),
]  # fmt: skip


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
    try:
        error = refusal(response.status_code, response.content, wanted)
        assert str(error["param"]).startswith(place) or not is_wrong, error
    except AssertionError as failure:
        failure.add_note(f"with {json.dumps(body)[:500]}")
        raise


def each_value(kind: type[msgspec.Struct], base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field's name, and the right one with one value in it."""
    for field in msgspec.structs.fields(kind):
        for value in VALUES:
            yield field.name, {**base, field.name: value}


@pytest.mark.parametrize(("path", "kind", "base"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_every_field(server: HttpServer, path: str, kind: type[msgspec.Struct], base: dict[str, Any]) -> None:
    for name, body in each_value(kind, base):
        judge(server, path, body, is_wrong=not is_of_type(kind, body), place=name)


@pytest.mark.parametrize(("place", "wrap", "kind", "base"), NESTED, ids=[place for place, *_ in NESTED])
def test_every_field_inside_a_field(
    server: HttpServer, place: str, wrap: Wrap, kind: type[msgspec.Struct], base: dict[str, Any]
) -> None:
    for _, item in each_value(kind, base):
        body = {"messages": QUESTION, "max_tokens": 1, **wrap(item)}
        judge(server, CHAT, body, is_wrong=not is_of_type(kind, item), place=place)


@each("path", [path for path, _, _ in ROUTES])
@each("body", [None, True, 0, 1.5, "text", [], [{}], {}])
def test_a_body_that_is_no_request(server: HttpServer, path: str, body: object) -> None:
    response = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    refusal(response.status_code, response.content, 400)
