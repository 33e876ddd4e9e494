"""Chat over real HTTP: whole answers, streams, logprobs, and that they agree."""

from typing import Any

import pytest
from tests.server.http_server import HttpServer

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is Octavo?"}]


def ask(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": QUESTION, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_a_whole_answer(server: HttpServer) -> None:
    reply = ask(server, model="demo")
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["system_fingerprint"].startswith("octavo-")
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert "language models" in choice["message"]["content"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_gives_the_same_text(server: HttpServer) -> None:
    whole = ask(server)
    first, *rest = server.stream(PATH, {"messages": QUESTION, "temperature": 0})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert text_of(rest, 0) == whole["choices"][0]["message"]["content"]
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in (first, *rest)}) == 1


def text_of(chunks: list[dict[str, Any]], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_each_sample_ends_once_with_an_empty_delta(server: HttpServer, num_samples: int) -> None:
    chunks = server.stream(PATH, {"messages": QUESTION, "n": num_samples, "seed": 5, "max_tokens": 9})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(num_samples))
    assert all(choice["delta"] == {} for choice in ends)
    whole = ask(server, n=num_samples, seed=5, max_tokens=9, temperature=0.3)
    assert [text_of(chunks, i) for i in range(num_samples)] == [c["message"]["content"] for c in whole["choices"]]


def test_usage_comes_last_with_no_choices(server: HttpServer) -> None:
    options = {"include_usage": True}
    chunks = server.stream(PATH, {"messages": QUESTION, "temperature": 0, "stream_options": options})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == ask(server)["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert {str(chunk["usage"]) for chunk in chunks[:-1]} == {"None"}


def test_usage_may_come_all_along(server: HttpServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(PATH, {"messages": QUESTION, "max_tokens": 5, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_rows_of_logprobs_spell_the_text(server: HttpServer) -> None:
    reply = ask(server, logprobs=True, top_logprobs=2)
    (choice,) = reply["choices"]
    rows = choice["logprobs"]["content"]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == choice["message"]["content"]
    for row in rows:
        assert len(row["top_logprobs"]) == 2
        assert row["logprob"] == row["top_logprobs"][0]["logprob"], "greedy takes the best"
    chunks = server.stream(PATH, {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2})
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [row for part in streamed if part for row in part["content"]] == rows


def test_a_stop_string_leaves_no_rows_behind(server: HttpServer) -> None:
    (choice,) = ask(server, logprobs=True, stop=["language mod"])["choices"]
    text = choice["message"]["content"]
    assert choice["stop_reason"] == "language mod"
    assert text
    assert "language mod" not in text
    spelt = [bytes(row["bytes"]).decode() for row in choice["logprobs"]["content"]]
    assert "".join(spelt).startswith(text)
    assert len("".join(spelt[:-1])) < len(text), "the stop string begins within the last token that is shown"


def test_a_developer_speaks_as_the_system_does(server: HttpServer) -> None:
    said = [
        ask(server, messages=[{"role": role, "content": "Be brief."}, *QUESTION]) for role in ("system", "developer")
    ]
    assert said[0]["choices"] == said[1]["choices"]
    assert said[0]["usage"]["prompt_tokens"] == said[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"n": 129}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
)
def test_what_is_refused(server: HttpServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(PATH, {"messages": QUESTION, "stream": True, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param


def test_an_unknown_model_is_not_found(server: HttpServer) -> None:
    response = server.post(PATH, {"messages": QUESTION, "model": "gpt-9"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
