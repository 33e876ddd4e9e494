"""Streaming text equals text made at once, however the tokens arrive, for every family of tokenizer."""

import codecs
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from octavo.tokenizer.detokenizer import ByteTable, DecoderRules, Detokenizer
from octavo.tokenizer.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], *, skip: bool) -> str:
    """Detokenize `ids`, cut into pieces at `cuts`."""
    detokenizer = Detokenizer(tokenizer.byte_table(skip))
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return "".join(detokenizer.push(ids[a:b]) for a, b in pairwise(edges)) + detokenizer.flush()


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_path(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("family", ["byte_level", "metaspace", "word_level"])
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_equal_decode(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=6))
    assert stream(tokenizer, ids, cuts, skip=skip) == tokenizer.decode(ids, skip)


@given(data=st.data(), skip=st.booleans())
def test_any_valid_sentencepiece_tokens_equal_decode(
    tokenizers: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = data.draw(st.lists(st.one_of(st.integers(0, 2), st.integers(259, tokenizer.vocab_size + 3)), max_size=30))
    text = data.draw(st.text(max_size=8))
    at = data.draw(st.integers(0, len(ids)))
    ids[at:at] = [3 + byte for byte in text.encode()]
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=6))
    assert stream(tokenizer, ids, cuts, skip=skip) == tokenizer.decode(ids, skip)


@given(data=st.data())
def test_invalid_bytes_are_replaced_as_python_does(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    raw = data.draw(st.lists(st.sampled_from([0x61, 0x80, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF]), max_size=12))
    cuts = data.draw(st.lists(st.integers(0, 12), max_size=6))
    text = stream(tokenizers["sentencepiece"], [3 + byte for byte in raw], cuts, skip=True)
    assert text == bytes(raw).decode(errors="replace")


@given(text=st.text(max_size=20))
def test_no_character_is_ever_split(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["byte_level"]
    assume("<" not in text)
    detokenizer = Detokenizer(tokenizer.byte_table(True))
    shown = ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert detokenizer.flush() == ""
    assert shown == text


def test_bytes_left_incomplete_show_at_the_end_only(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("\N{UMBRELLA}")
    assert len(ids) > 1, "the test needs a character of several tokens"
    detokenizer = Detokenizer(tokenizer.byte_table(True))
    assert [detokenizer.push([token_id]) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("family", ["sentencepiece", "metaspace"])
def test_output_that_continues_the_prompt_keeps_its_space(tokenizers: dict[str, Tokenizer], family: str) -> None:
    tokenizer = tokenizers[family]
    prompt, whole = tokenizer.encode("a"), tokenizer.encode("a b")
    output = whole[len(prompt) :]
    assert tokenizer.decode(prompt) + Detokenizer(tokenizer.byte_table(True), prompt).push(output) == "a b"
    assert Detokenizer(tokenizer.byte_table(True)).push(output) == tokenizer.decode(output) == "b"


def test_a_prompt_of_special_tokens_only_is_no_text_to_continue(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    bos, *output = tokenizer.encode("a b")
    assert Detokenizer(tokenizer.byte_table(True), [bos]).push(output) == "a b"


def test_a_prompt_cut_within_a_character_leaves_nothing_behind(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    assert Detokenizer(tokenizer.byte_table(True), [3 + 0xE2]).push(tokenizer.encode("a")[1:]).strip() == "a"


def test_only_the_spaces_that_open_the_text_are_dropped() -> None:
    detokenizer = Detokenizer(ByteTable(DecoderRules(num_leading_spaces=2), chr))
    assert [detokenizer.push([byte]) for byte in b"   a  b"] == ["", "", " ", "a", " ", " ", "b"]


def test_the_incremental_decoder_of_python_replaces_as_the_whole_one_does() -> None:
    for raw in (b"\xe2\x82a", b"\xf0\x9f\x99", b"\xc3\xc3\xa9", b"\xed\xa0\x80"):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [decoder.decode(bytes([byte])) for byte in raw]
        assert "".join(pieces) + decoder.decode(b"", True) == raw.decode(errors="replace")
