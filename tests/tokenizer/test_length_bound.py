"""The bound on a text's tokens: never more than there are, whatever a tokenizer drops, fuses or composes."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokenizer.conftest import FAMILIES, byte_level, metaspace, sentencepiece
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.tokenizer.tokenizer import LengthBound


def composing() -> Backend:
    """As Qwen, which composes characters first."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("~~~", "~")])
    return backend


def swallowing() -> Backend:
    """As Phi-3: tokens that swallow the spaces around them."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True)])
    return backend


def incomplete() -> Backend:
    """As SmolLM2: bytes that are no tokens vanish."""
    backend = byte_level()
    letters = {*pre_tokenizers.ByteLevel.alphabet()}
    vocab = {letter: rank for rank, letter in enumerate(sorted(letters - {"Ą", "ñ"}))}  # bytes 0x04 and 0xF1
    backend.model = models.BPE(vocab, [])
    return backend


def collapsing() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex("e+"), "e")
    return backend


def removing() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("e", "removed"), backend.pre_tokenizer])
    return backend


def fusing() -> Backend:
    """Unknown characters become one token; there are no bytes to fall back to."""
    backend = sentencepiece()
    vocab = {text: id_ for text, id_ in backend.get_vocab().items() if text != "<0x65>"}
    backend.model = models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return backend


# Each with whether letters, and whether other characters, prove anything.
MAKERS: dict[str, tuple[Callable[[], Backend], bool, bool]] = {
    "byte_level": (byte_level, True, True),
    "sentencepiece": (sentencepiece, True, True),
    "metaspace": (metaspace, True, True),
    "composing": (composing, True, False),
    "swallowing": (swallowing, True, False),
    "incomplete": (incomplete, True, True),
    "word_level": (FAMILIES["word_level"][0], False, False),
    "collapsing": (collapsing, False, False),
    "removing": (removing, False, False),
    "fusing": (fusing, False, False),
}
PIECES = [*"abeé日🙂 ~\x04\u0301\u0323\ufb01\U00040000", "<|end|>", "naïve €", "e" * 300, " " * 300, "a\u0323\u0302"]


@cache
def made(name: str) -> tuple[Backend, LengthBound]:
    backend = MAKERS[name][0]()
    return backend, LengthBound.of(backend)


@pytest.mark.parametrize("name", MAKERS)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    backend, bound = made(name)
    assert bound.min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", MAKERS)
def test_the_bound_is_there_for_all_tokenizers_that_lose_nothing(name: str) -> None:
    _, bound = made(name)
    _, knows_letters, knows_all = MAKERS[name]
    assert (bound.min_tokens("the quick fox " * 10_000) > 2000) == knows_letters
    assert (bound.min_tokens(" -" * 50_000) > 2000) == knows_all
