"""Chunks as bytes: the quick form of the plain ones is the slow form of the others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.openai.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.server.openai.reply_stream import Chunks, ReplyHead

HEAD = ReplyHead(id="chatcmpl-1", model='m"odel', created=7, system_fingerprint="f")
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=4,
    total_tokens=7,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=1),
    completion_tokens_details=CompletionTokensDetails(),
)


def parsed(frame: bytes) -> Any:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    return json.loads(frame[6:])


@given(text=st.text())
@pytest.mark.parametrize("shows_usage", [False, True])
def test_a_piece_of_content_says_what_the_long_way_says(text: str, shows_usage: bool) -> None:
    chunks = Chunks(HEAD, 3, is_chat=True, include_usage=shows_usage)
    assert parsed(chunks.text(2, text)) == parsed(chunks.piece(2, {"content": text}))
    assert parsed(chunks.text(2, text))["choices"][0]["delta"] == {"content": text}
    assert ("usage" in parsed(chunks.text(0, text))) == shows_usage


@given(text=st.text())
def test_a_piece_of_text_says_what_the_long_way_says(text: str) -> None:
    chunks = Chunks(HEAD, 2, is_chat=False, include_usage=False)
    assert parsed(chunks.text(1, text)) == parsed(chunks.piece(1, text))
    assert parsed(chunks.text(1, text))["choices"][0]["text"] == text


def test_the_head_is_the_same_in_all() -> None:
    chunks = Chunks(HEAD, 1, is_chat=True, include_usage=True)
    frames = [chunks.text(0, "x"), chunks.piece(0, {}, finish_reason="stop", stop_reason=None), chunks.usage(USAGE)]
    for chunk in map(parsed, frames):
        assert (chunk["id"], chunk["object"], chunk["created"]) == ("chatcmpl-1", "chat.completion.chunk", 7)
        assert (chunk["model"], chunk["system_fingerprint"]) == ('m"odel', "f")


def test_usage_is_null_until_it_is_told() -> None:
    chunks = Chunks(HEAD, 1, is_chat=True, include_usage=True)
    assert parsed(chunks.text(0, "x"))["usage"] is None
    last = parsed(chunks.usage(USAGE))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert parsed(chunks.piece(0, {}, usage=USAGE))["usage"]["completion_tokens"] == 4
