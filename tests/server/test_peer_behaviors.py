"""What llama.cpp's and vLLM's own server tests hold of any server, in our words and on our model.

Left out is what belongs to their engines (context shifting, slots, LoRA, infill, embeddings) and what our other tests
of the server hold already.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.http_server import HttpServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = [{"role": "user", "content": "What is a block?"}]
PROMPT = "Octavo is"


def complete(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post(TEXT, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"messages": QUESTION, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(server: HttpServer, path: str, **fields: Any) -> str:
    base = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
    response = server.post(path, {**base, "max_tokens": 4, **fields})
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


# ------------------------------------------------------------------------------------------------ llama.cpp


def test_the_same_seed_gives_the_same_text_and_others_differ(server: HttpServer) -> None:
    def texts(seeds: list[int]) -> set[str]:
        return {complete(server, prompt="Q", seed=seed, temperature=2.0)["choices"][0]["text"] for seed in seeds}

    assert len(texts([42] * 4)) == 1
    assert len(texts([1, 2, 3, 4])) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_request_many_times_at_once_gives_the_same(server: HttpServer, temperature: float) -> None:
    fields = {"seed": 42, "temperature": temperature, "max_tokens": 24}
    alone = complete(server, **fields)["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        together = [pool.submit(complete, server, **fields) for _ in range(16)]
    assert {answer.result()["choices"][0]["text"] for answer in together} == {alone}


def test_a_prompt_in_tokens_is_the_same_prompt(server: HttpServer) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    by_text, by_tokens = complete(server), complete(server, prompt=tokens)
    assert by_text["choices"] == by_tokens["choices"]
    assert by_text["usage"]["prompt_tokens"] == by_tokens["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("text", ["What is the capital of Bulgaria ?", "café 🐈 東京", " two  spaces ", ""])
def test_text_to_tokens_and_back(server: HttpServer, text: str) -> None:
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text


def test_a_system_message_counts_and_steers(server: HttpServer) -> None:
    messages = [{"role": "system", "content": "You are kind."}, *QUESTION]
    with_system = chat(server, messages=messages)["usage"]["prompt_tokens"]
    assert with_system > chat(server)["usage"]["prompt_tokens"]


def test_the_number_of_tokens_is_what_was_asked_for(server: HttpServer) -> None:
    for number in (1, 7, 33):
        answer = complete(server, max_tokens=number, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == number
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_was_seen_before_gives_the_same(server: HttpServer) -> None:
    prompt = "A block is a piece of memory. " * 30
    cold = complete(server, prompt=prompt, cache_salt="a", max_tokens=24)
    warm = complete(server, prompt=prompt, cache_salt="a", max_tokens=24)
    assert warm["choices"] == cold["choices"]


def test_words_to_avoid_and_to_prefer(server: HttpServer) -> None:
    [token] = server.post("/tokenize", {"prompt": "7"}).json()["tokens"]
    assert complete(server, logit_bias={str(token): 100}, max_tokens=5)["choices"][0]["text"] == "77777"
    free = complete(server)["choices"][0]["text"]
    [first, *_] = server.post("/tokenize", {"prompt": free}).json()["tokens"]
    assert complete(server, logit_bias={str(first): -100})["choices"][0]["text"] != free


def test_a_form_without_a_model_that_knows_it(server: HttpServer) -> None:
    for fields in ({"structured_outputs": {"regex": "[ab]{4}"}}, {"guided_regex": "[ab]{4}"}):
        text = complete(server, **fields, temperature=1.0, seed=3)["choices"][0]["text"]
        assert len(text) == 4
        assert set(text) <= {"a", "b"}
    assert complete(server, guided_choice=["yes", "no"])["choices"][0]["text"] in ("yes", "no")


def test_a_model_name_may_be_left_out(server: HttpServer) -> None:
    assert complete(server)["model"] == "demo"


# ------------------------------------------------------------------------------------------------ vLLM


def test_without_logprobs_there_are_none(server: HttpServer) -> None:
    assert complete(server)["choices"][0]["logprobs"] is None
    assert chat(server)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("number", [0, 1, 5])
def test_so_many_logprobs_as_were_asked_for(server: HttpServer, number: int) -> None:
    rows = complete(server, logprobs=number)["choices"][0]["logprobs"]
    assert len(rows["tokens"]) == len(rows["token_logprobs"]) == 8
    assert all(number <= len(top) <= number + 1 for top in rows["top_logprobs"])
    content = chat(server, logprobs=True, top_logprobs=number)["choices"][0]["logprobs"]["content"]
    assert all(len(row["top_logprobs"]) == number for row in content)


def test_too_many_logprobs(server: HttpServer) -> None:
    assert refused(server, TEXT, logprobs=21) == "logprobs"
    assert refused(server, CHAT, logprobs=True, top_logprobs=21) == "top_logprobs"


def test_choices_of_several_prompts_are_in_the_order_of_prompts(server: HttpServer) -> None:
    prompts = [PROMPT, "A block is", PROMPT]
    choices = complete(server, prompt=prompts, n=2, temperature=1.0, seed=5)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    greedy = complete(server, prompt=prompts)["choices"]
    assert greedy[0]["text"] == greedy[2]["text"] != greedy[1]["text"]


def test_usage_bills_the_prompt_once(server: HttpServer) -> None:
    one, three = complete(server)["usage"], complete(server, n=3, temperature=1.0)["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] > one["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_comes_when_it_was_asked_for_and_not_else(server: HttpServer, path: str) -> None:
    base: dict[str, Any] = {"messages": QUESTION, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    plain = server.stream(path, base)
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in plain)
    *chunks, last = server.stream(path, {**base, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    totals = [chunk["usage"]["total_tokens"] for chunk in server.stream(path, {**base, "stream_options": continuous})]
    assert totals == sorted(totals)


def test_stream_options_without_a_stream_are_refused(server: HttpServer) -> None:
    assert refused(server, CHAT, stream_options={"include_usage": True}) == "stream_options"


def test_a_stop_string_is_shown_only_when_asked_for(server: HttpServer) -> None:
    text = complete(server, max_tokens=20)["choices"][0]["text"]
    mark = text[5:8]
    before = text.partition(mark)[0]
    assert complete(server, max_tokens=20, stop=mark)["choices"][0]["text"] == before
    shown = complete(server, max_tokens=20, stop=[mark], include_stop_str_in_output=True)["choices"][0]
    assert (shown["text"], shown["stop_reason"]) == (before + mark, mark)


def test_a_stop_token(server: HttpServer) -> None:
    text = complete(server)["choices"][0]["text"]
    [first, *_] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    choice = complete(server, stop_token_ids=[first])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first)


def test_only_allowed_tokens(server: HttpServer) -> None:
    allowed = server.post("/tokenize", {"prompt": "12"}).json()["tokens"]
    text = complete(server, allowed_token_ids=allowed, temperature=1.0, ignore_eos=True)["choices"][0]["text"]
    assert set(text) <= {"1", "2"}


def test_content_in_parts_is_the_same_content(server: HttpServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert chat(server, messages=parts)["choices"] == chat(server)["choices"]


def test_an_image_for_a_model_that_sees_none(server: HttpServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    assert refused(server, CHAT, messages=[{"role": "user", "content": [part]}]).startswith("messages")


def test_going_on_with_the_last_message(server: HttpServer) -> None:
    whole = chat(server)["choices"][0]["message"]["content"]
    begun = [*QUESTION, {"role": "assistant", "content": whole[:12]}]
    answer = chat(server, messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert whole[:12] + answer["choices"][0]["message"]["content"] == whole


def test_token_ids_are_returned_when_asked_for(server: HttpServer) -> None:
    choice = complete(server, return_token_ids=True)["choices"][0]
    assert server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"] == choice["text"]


def test_prompt_logprobs(server: HttpServer) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    rows = complete(server, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert len(rows) == len(tokens)
    assert rows[0] is None
    assert all(str(token) in row for token, row in zip(tokens[1:], rows[1:], strict=True))


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [2**31], [-1]])
def test_prompts_that_are_none(server: HttpServer, prompt: object) -> None:
    assert refused(server, TEXT, prompt=prompt).startswith("prompt")


def test_a_name_for_a_turn_and_a_role_of_ones_own(server: HttpServer) -> None:
    named = [{"role": "user", "name": "ada", "content": QUESTION[0]["content"]}]
    assert chat(server, messages=named)["choices"] == chat(server)["choices"]


def test_the_version_and_the_card(server: HttpServer) -> None:
    assert set(server.client.get("/version").json()) == {"version"}
    card = server.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("demo", "model", 2048)
