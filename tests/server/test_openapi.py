"""The OpenAPI page: every route is on it, with what it takes and gives, and every reference leads somewhere."""

import re
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
            assert ("requestBody" in operation) == (method == "post" and not path.endswith("/cancel")), path
            assert operation["responses"].keys() == {"200", "default"}


def test_fields_are_listed_with_their_types(page: dict[str, Any]) -> None:
    request = page["components"]["schemas"]["ChatCompletionRequest"]
    assert request["required"] == ["messages"]
    assert {"type": "integer"} in request["properties"]["top_k"]["anyOf"]


def test_the_page_for_people_needs_no_other_server(server: HttpServer) -> None:
    """All that it loads is here, and is what it says."""
    docs = server.client.get("/docs").text
    assert "'/openapi.json'" in docs
    loaded = re.findall(r'(?:src|href)="([^"]*)"', docs)
    assert len(loaded) == 3
    for path in loaded:
        assert path.startswith("/docs/")
        response = server.client.get(path)
        assert (response.status_code, len(response.content) > 500) == (200, True)
        assert response.headers["content-type"].partition("/")[0] in ("text", "image")
    assert server.client.get("/docs/other.js").status_code == 404


def test_operations_are_described_and_have_examples_that_work(server: HttpServer, page: dict[str, Any]) -> None:
    for path, operations in page["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            if "requestBody" in operation:
                examples = operation["requestBody"]["content"]["application/json"]["examples"]
                for example in examples.values():
                    takes_more = (
                        path.startswith("/v1") and path != "/v1/systemone"
                    )  # which refuses what it does not know
                    body = example["value"] | ({"max_tokens": 2} if takes_more else {})
                    assert server.post(path, body).status_code == 200


def test_one_can_authorize(page: dict[str, Any]) -> None:
    assert {"type": "http", "scheme": "bearer"}.items() <= page["components"]["securitySchemes"]["bearer"].items()
    assert {"bearer": []} in page["security"]
