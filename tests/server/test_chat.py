"""Chat over real HTTP: the whole answer, the stream, and that they agree."""

from tests.server.http_server import HttpServer

QUESTION = [{"role": "user", "content": "What is Octavo?"}]


def test_a_whole_answer(server: HttpServer) -> None:
    reply = server.post("/v1/chat/completions", {"model": "demo", "messages": QUESTION, "temperature": 0}).json()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert "language models" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_gives_the_same_text(server: HttpServer) -> None:
    body = {"messages": QUESTION, "temperature": 0}
    whole = server.post("/v1/chat/completions", body).json()
    first, *rest = server.stream("/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(c["choices"][0]["delta"].get("content", "") for c in rest) == whole["choices"][0]["message"]["content"]
    )
    assert [c["choices"][0]["finish_reason"] for c in rest if c["choices"][0]["finish_reason"]] == ["stop"]
    assert len({(c["id"], c["created"], c["model"]) for c in (first, *rest)}) == 1
