"""Several conversations in one request: one choice each, in order."""

from typing import Any

import pytest
from tests.server.http_server import HttpServer

PATH = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("What is a block?", "What is 2 + 2?", "Hello!")]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def test_each_conversation_has_a_choice(server: HttpServer) -> None:
    reply = server.post(PATH, OPTIONS | {"messages": CHATS}).json()
    alone = [server.post("/v1/chat/completions", OPTIONS | {"messages": chat}).json() for chat in CHATS]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in reply["choices"]] == [each["choices"][0]["message"] for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reply["usage"][name] == sum(each["usage"][name] for each in alone)
    assert server.post(PATH.removeprefix("/v1"), OPTIONS | {"messages": CHATS[:1]}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [CHATS[0], []]}, "messages[1]"),
        (
            {"messages": [CHATS[0], [{"role": "user", "content": [{"type": "audio"}]}]]},
            "messages[1][0].content[0].type",
        ),
        ({"messages": CHATS[0]}, "messages[0]"),
    ],
)
def test_what_cannot_be_answered_is_refused(server: HttpServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(PATH, OPTIONS | {"messages": CHATS} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
