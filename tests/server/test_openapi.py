"""The OpenAPI page: every route is on it, with what it takes and gives, and every reference leads somewhere."""

from typing import Any

import pytest
from tests.server.http_server import HttpServer


@pytest.fixture(scope="module")
def page(server: HttpServer) -> dict[str, Any]:
    shown: dict[str, Any] = server.client.get("/openapi.json").json()
    return shown


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(item) for item in node)) if isinstance(node, list) else set()


def test_references_lead_somewhere(page: dict[str, Any]) -> None:
    names = {reference.removeprefix("#/components/schemas/") for reference in references(page)}
    assert {"ChatCompletionRequest", "ChatMessage", "CompletionRequest", "ErrorReply"} <= names
    assert names <= page["components"]["schemas"].keys()


def test_routes_that_take_a_body_say_which(page: dict[str, Any]) -> None:
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post"), path
            assert operation["responses"].keys() == {"200", "default"}


def test_fields_are_listed_with_their_types(page: dict[str, Any]) -> None:
    request = page["components"]["schemas"]["ChatCompletionRequest"]
    assert request["required"] == ["messages"]
    assert {"type": "integer"} in request["properties"]["top_k"]["anyOf"]


def test_the_page_for_people_is_there(server: HttpServer) -> None:
    assert "/openapi.json" in server.client.get("/docs").text
