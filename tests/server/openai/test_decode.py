"""From bytes to wire types: what is accepted, and which field an error names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol import MAX_DEPTH, ChatCompletionRequest, CompletionRequest, read_request


def refusal(body: bytes, kind: type[object] = ChatCompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(body, kind)
    assert caught.value.status == 400
    return caught.value


def test_unknown_fields_and_nulls_are_accepted() -> None:
    body = {"messages": [{"role": "user", "content": "hi", "odd": [1]}], "store": True, "n": None, "verbosity": "low"}
    request, _ = read_request(json.dumps(body).encode(), ChatCompletionRequest)
    assert request.messages[0].content == "hi"
    assert request.n is None


def test_integers_may_be_written_as_floats() -> None:
    video = {"type": "video_url", "video_url": {"url": "data:,", "num_frames": 2.0}}
    body = {
        "messages": [{"role": "user", "content": [video]}], "max_tokens": 16.0, "seed": -3.0, "temperature": 1.0,
        "stop_token_ids": [1.0, 2, 3e2], "chat_template_kwargs": {"budget": 1.0},
    }  # fmt: skip
    request, _ = read_request(json.dumps(body).encode(), ChatCompletionRequest)
    assert (request.max_tokens, request.seed, request.stop_token_ids) == (16, -3, [1, 2, 300])
    assert request.messages[0].content[0].video_url.num_frames == 2  # type: ignore[index, union-attr]
    assert isinstance(request.temperature, float)
    assert isinstance(request.chat_template_kwargs["budget"], float)  # type: ignore[index]  # it is the template's
    assert read_request(b'{"prompt": [1.0, 2.0]}', CompletionRequest)[0].prompt == [1, 2]
    for wrong, param in (({"n": 1.5}, "n"), ({"n": 1.0, "seed": 0.5}, "seed"), ({"stop": 1.0}, "stop")):
        assert refusal(json.dumps({"messages": [], **wrong}).encode()).detail.param == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [{"role": 3}]}, "messages[0].role", "expected a string, got an integer"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
        ({}, "messages", "Missing required parameter: 'messages'"),
        ({"messages": [], "n": "1"}, "n", "expected an integer, got a string"),
        ({"messages": [], "temperature": [1]}, "temperature", "expected a number, got an array"),
        ({"messages": [], "stop": {"a": 1}}, "stop", "expected a string or an array, got an object"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "Missing"),
        ([], None, "Invalid request body: expected an object, got an array"),
        ("text", None, "expected an object, got a string"),
    ],
)
def test_a_wrong_type_is_named_with_its_path(body: object, param: str | None, words: str) -> None:
    error = refusal(json.dumps(body).encode())
    assert error.detail.param == param
    assert words in error.detail.message
    assert "`" not in error.detail.message


def test_a_number_out_of_range_is_named_unless_nobody_reads_it() -> None:
    assert refusal(b'{"messages": [], "seed": 1e400}').detail.param == "seed"
    request, _ = read_request(b'{"messages": [], "nobody": 1e400}', ChatCompletionRequest)
    assert request.messages == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"messages": []', b'{"messages": [{"role": "\xff"}]}', b"NaN", b'{"messages": []} x']
)
def test_what_is_no_json(body: bytes) -> None:
    assert refusal(body).detail.code == "invalid_json"


def test_a_hundred_thousand_levels_are_refused() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = b'{"messages": ' + opening * 100_000 + b"1" + closing * 100_000 + b"}"
        assert "nested" in refusal(body).detail.message


@given(depth=st.integers(1, 2 * MAX_DEPTH), text=st.text(alphabet='[]{}\\"x', max_size=300))
def test_depth_is_that_of_the_structure_whatever_is_in_strings(depth: int, text: str) -> None:
    value: object = text
    for _ in range(depth - 1):
        value = [value]
    body = json.dumps({"prompt": "x", "unknown": value, "more": [text] * 3}).encode()
    if depth <= MAX_DEPTH:
        assert read_request(body, CompletionRequest)[0].prompt == "x"
    else:
        assert "nested" in refusal(body, CompletionRequest).detail.message


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1, 2], [3]], ["x", [1]]])
def test_prompts_come_in_four_kinds(prompt: object) -> None:
    assert read_request(json.dumps({"prompt": prompt}).encode(), CompletionRequest)[0].prompt == prompt
