"""What a request asks for and does not get is answered with a warning, for the client and once in the log."""

from typing import Any

import pytest
from tests.server.http_server import HttpServer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
HEADER = "x-octavo-warnings"


def warnings(server: HttpServer, fields: dict[str, Any], path: str = CHAT) -> str | None:
    response = server.post(path, (BODY if path == CHAT else {"prompt": "Hi", "max_tokens": 2}) | fields)
    assert response.status_code == 200, response.text
    header: str | None = response.headers.get(HEADER)
    return header


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("temprature", "unknown field 'temprature' has no effect; did you mean 'temperature'?"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("functions", "did you mean 'tools'?"),
        ("audio", "'audio' is not supported"),
        ("web_search_options", "'web_search_options' is not supported"),
        ("qqqqqqqq\N{SNOWMAN}\n", r"unknown field 'qqqqqqqq\u2603\n' has no effect"),
    ],
)
def test_fields_without_effect_are_named(server: HttpServer, field: str, words: str) -> None:
    header = warnings(server, {field: []})
    assert header is not None
    assert words in header


def test_what_every_client_sends_is_no_reason_to_warn(server: HttpServer) -> None:
    usual = {"user": "me", "store": False, "metadata": {}, "service_tier": "auto", "seed": 1}
    assert warnings(server, usual) is None


def test_streams_and_errors_warn_too_and_the_log_does_once(server: HttpServer) -> None:
    for _ in range(2):
        with server.client.stream("POST", CHAT, json=BODY | {"stream": True, "top_kk": 1}) as response:
            assert "'top_k'" in response.headers[HEADER]
            response.read()
    refused = server.post(CHAT, BODY | {"top_kk": 1, "temperature": -1})
    assert (refused.status_code, "'top_k'" in refused.headers[HEADER]) == (400, True)
    assert server.log.count("top_kk") == 1


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_leaves(server: HttpServer, field: str) -> None:
    header = warnings(server, {field: 10**9, "stop": [" ", "e", "."]})
    assert header is not None
    assert header.startswith(f"{field} is lowered to ")
    longer = warnings(server, {field: 10**9, "stop": [" ", "e", "."], "messages": BODY["messages"] * 3})
    assert longer is not None
    assert longer != header
    assert server.log.count(f"{field} is lowered") == 1  # whatever the number


def test_fields_are_those_of_the_route(server: HttpServer) -> None:
    assert warnings(server, {"echo": True}, "/v1/completions") is None
    assert "'tools'" in str(warnings(server, {"tools": []}, "/v1/completions"))
    assert HEADER in server.post("/tokenize", {"prompt": "x", "promt": "y"}).headers


def test_many_unknown_fields_make_no_long_header(server: HttpServer) -> None:
    header = warnings(server, {f"{index}" * 300: 1 for index in range(100, 200)})
    assert header is not None
    assert "92 more unknown fields" in header
    assert len(header) < 1000


def test_temperatures_have_a_limit(server: HttpServer) -> None:
    response = server.post(CHAT, BODY | {"temperature": 2.5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"
    assert "--max-temperature" in response.json()["error"]["message"]
    assert server.post(CHAT, BODY | {"temperature": 2}).status_code == 200


def test_messages_without_content_are_named(server: HttpServer) -> None:
    for role in ("user", "system", "developer"):
        messages = [*BODY["messages"], {"role": role, "content": None}]
        error = server.post(CHAT, {"messages": messages}).json()["error"]
        assert error["param"] == "messages[1].content"
        assert role in error["message"]


def test_system_messages_that_the_template_would_drop_are_merged_and_warned_of(server: HttpServer) -> None:
    """As the demo model's does: it writes a system message only where it is the first."""
    user, system = BODY["messages"][0], {"role": "system", "content": "Be brief."}
    header = warnings(server, {"messages": [user, system, user]})
    assert header is not None
    assert "merged into the first" in header
    assert warnings(server, {"messages": [system, user, user]}) is None
    prompts = [
        server.post("/tokenize", {"messages": messages}).json()["tokens"]
        for messages in ([user, system, user], [system, user, user])
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"structured_outputs": {"choice": ["a"], "regx": "b"}},
            "structured_outputs: unknown field 'regx' has no effect",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema has no effect",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "with type 'json_object'"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format: unknown field 'strict'"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs.'enable_thinkin' does not change"),
        ({"documents": [{"text": "x"}]}, "documents have no effect"),
    ],
)
def test_parts_without_effect_are_named(server: HttpServer, fields: dict[str, Any], words: str) -> None:
    assert words in str(warnings(server, fields))


def test_what_has_an_effect_is_no_reason_to_warn(server: HttpServer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    form = {"response_format": {"type": "json_object", "schema": {"type": "object"}}}
    assert warnings(server, {"reasoning_effort": "low", "tools": [tool]} | form) is None


def test_a_constraint_without_a_known_key_is_refused(server: HttpServer) -> None:
    for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "Hi", "max_tokens": 2})):
        for misspelled in ({"choise": ["a"]}, {}):
            response = server.post(path, body | {"structured_outputs": misspelled})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "structured_outputs"
            assert "json, json_object, regex, choice, grammar" in response.json()["error"]["message"]
    assert warnings(server, {"structured_outputs": {"json": None}}) is None
