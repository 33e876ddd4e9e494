"""Completions over real HTTP, held against the same model called in this process."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.http_server import HttpServer

from octavo import LLM, SamplingParams

PATH = "/v1/completions"
PROMPT = "Octavo is an engine"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("demo")
    yield llm
    llm.exit()


def complete(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"prompt": PROMPT, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_the_text_is_that_of_the_engine_with_all_its_parameters(server: HttpServer, llm: LLM) -> None:
    fields = {
        "seed": 11, "temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "max_tokens": 30, "min_tokens": 20,
    }  # fmt: skip
    params = llm.get_default_sampling_params().replace(**fields)
    (wanted,) = llm.generate([PROMPT], params)
    reply = complete(server, **fields)
    assert reply["choices"][0]["text"] == wanted.text
    assert reply["choices"][0]["finish_reason"] == wanted.outputs[0].finish_reason
    assert reply["usage"]["completion_tokens"] == len(wanted.outputs[0].token_ids)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_rates_a_continuation(server: HttpServer, llm: LLM, max_tokens: int) -> None:
    """As lm-eval does it: echo, logprobs, one token or none."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, prompt_logprobs=3)
    (wanted,) = llm.generate([PROMPT], params)
    assert wanted.prompt_logprobs is not None
    choice = complete(server, echo=True, logprobs=3, max_tokens=max_tokens)["choices"][0]
    lists = choice["logprobs"]
    num_prompt = len(wanted.prompt_token_ids)
    assert {len(values) for values in lists.values()} == {num_prompt + max_tokens}
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    rated = [
        entry and entry[token_id].logprob
        for entry, token_id in zip(wanted.prompt_logprobs, wanted.prompt_token_ids, strict=True)
    ]
    assert lists["token_logprobs"][:num_prompt] == rated
    assert choice["text"] == PROMPT + (wanted.text if max_tokens else "")
    assert "".join(lists["tokens"][:num_prompt]) == PROMPT
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    rows = list(zip(*(lists[name] for name in columns), strict=True))
    assert all(choice["text"][offset:].startswith(token) for token, _, _, offset in rows[:num_prompt])
    for token, logprob, top, _ in rows[1:]:
        assert top[token] == logprob
        assert 3 <= len(top) <= 4


def test_nothing_generated_is_nothing_billed(server: HttpServer) -> None:
    reply = complete(server, max_tokens=0)
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert reply["usage"]["completion_tokens"] == 0


def test_the_end_token_has_its_entry_so_that_counts_are_exact(server: HttpServer, llm: LLM) -> None:
    end = llm.get_tokenizer().eos_token_id
    choice = complete(server, max_tokens=1, logprobs=0, echo=True, logit_bias={str(end): 100})["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(llm.get_tokenizer().encode(PROMPT)) + 1


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 2}, {"n": 2, "seed": 3}])
def test_a_stream_says_what_the_whole_says(server: HttpServer, fields: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "Hello"], "temperature": 0.7, "seed": 1, "max_tokens": 12, **fields}
    whole = server.post(PATH, body).json()
    chunks = server.stream(PATH, body)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for c in own if c["logprobs"] for value in c["logprobs"][name]] == values


def test_a_prompt_may_be_cut_and_a_reply_named(server: HttpServer) -> None:
    reply = complete(server, truncate_prompt_tokens=2, echo=True, max_tokens=0, request_id="mine")
    assert reply["usage"]["prompt_tokens"] == 2
    assert PROMPT.endswith(reply["choices"][0]["text"])
    assert reply["id"] == "cmpl-mine"


def test_a_model_that_fills_no_middle_says_so(server: HttpServer) -> None:
    response = server.post(PATH, {"prompt": "a", "suffix": "b"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert "fills in the middle" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "ab " * 2500},
        {"prompt": ["x", "ab " * 20_000]},
        {"prompt": "ab " * 20_000, "add_special_tokens": False},
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_the_known_words(server: HttpServer, fields: dict[str, Any]) -> None:
    error = server.post(PATH, fields).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 2048 tokens")
    assert ("at least" in error["message"]) == (fields["prompt"] != "ab " * 2500)  # proven by its size alone
    assert error["code"] == "context_length_exceeded"
    assert complete(server, **fields | {"truncate_prompt_tokens": 5}, max_tokens=1)
