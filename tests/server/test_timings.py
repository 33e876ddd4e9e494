"""`timings` as llama.cpp gives them: in whole answers, in the last chunk, in every chunk if asked; not in kept ones."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.http_server import HttpServer

PATHS = ("/v1/chat/completions", "/v1/completions")
QUESTION = [{"role": "user", "content": "What is Octavo?"}]
LONG = {"messages": [{"role": "user", "content": "a b c d " * 12}]}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with HttpServer("--block-size", "4", "--max-num-batched-tokens", "16", has_model=False) as running:
        yield running


def body(path: str, **fields: Any) -> dict[str, Any]:
    fields |= {"ignore_eos": True}  # all answers have as many tokens
    return {"messages": QUESTION} | fields if "chat" in path else {"prompt": "What is Octavo? " * 4} | fields


def check(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (timings["cache_n"], timings["prompt_n"]) == (cached, usage["prompt_tokens"] - cached)
    assert timings["predicted_n"] == usage["completion_tokens"]
    for kind in ("prompt", "predicted"):
        num, ms = timings[f"{kind}_n"], timings[f"{kind}_ms"]
        assert ms > 0
        assert timings[f"{kind}_per_token_ms"] == pytest.approx(ms / num, rel=0.01)
        assert timings[f"{kind}_per_second"] == pytest.approx(1000 * num / ms, rel=0.01)


@pytest.mark.parametrize("path", PATHS)
def test_they_are_in_the_last_chunk_and_in_whole_answers(server: HttpServer, path: str) -> None:
    reply = server.post(path, body(path, max_tokens=8, n=2)).json()
    check(reply["timings"], reply["usage"])
    again = server.post(path, body(path, max_tokens=8)).json()
    check(again["timings"], again["usage"])
    assert again["timings"]["cache_n"] > 0
    fields = body(path, max_tokens=8, n=2)
    *chunks, last = server.stream(path, fields)
    assert not any("timings" in chunk for chunk in chunks)
    assert last["choices"][0]["finish_reason"]
    assert last["timings"]["predicted_n"] == reply["usage"]["completion_tokens"]
    *chunks, last = server.stream(path, fields | {"stream_options": {"include_usage": True}})
    assert not any("timings" in chunk for chunk in chunks)
    check(last["timings"], last["usage"])


@pytest.mark.parametrize("path", PATHS)
def test_every_chunk_has_them_if_asked(server: HttpServer, path: str) -> None:
    chunks = server.stream(path, body(path, max_tokens=8, timings_per_token=True))
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_an_answer_that_is_kept_is_the_same_each_time(server: HttpServer) -> None:
    fields = body(PATHS[0], max_tokens=3, timings_per_token=True)
    kept = server.client.post(PATHS[0], json=fields, headers={"idempotency-key": "one"})
    assert "timings" not in kept.json()
    assert server.client.post(PATHS[0], json=fields, headers={"idempotency-key": "one"}).content == kept.content


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_how_much_of_its_prompt_is_computed(server: HttpServer, path: str) -> None:
    fields = body(path, max_tokens=2, return_progress=True) | {"user": path}
    chunks = server.stream(path, fields | ({"prompt": "a b c d " * 12} if "prompt" in fields else LONG))
    found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(found) > 1
    assert found == sorted(found, key=lambda each: each["processed"])
    assert found[-1]["processed"] == found[-1]["total"]
    assert all(each.keys() == {"total", "cache", "processed", "time_ms"} for each in found)
    assert found[0]["processed"] > found[0]["cache"]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    if "chat" in path:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_progress" in chunk for chunk in server.stream(path, body(path, max_tokens=2)))
