"""Proves that a text is too long without tokenizing it, from the longest token and what the tokenizer does to text.

A token covers a limited number of characters, and of letters, so a text has at least as many tokens as it has letters
divided by the letters of the token with the most. Some tokenizers drop spaces or unknown characters, others compose
characters with the marks that follow; what a tokenizer may do to letters or to all characters decides which of the two
bounds holds. Of kinds of tokenizers that are not listed here, nothing is assumed.
"""

import json
import string
import unicodedata
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Self

from tokenizers import Tokenizer as Backend
from tokenizers import models

from octavo.tokenizer.detokenizer import byte_alphabet

_LETTERS = (string.ascii_letters + string.digits).encode()
_LETTER_SET = frozenset(_LETTERS.decode())
_CONTROLS = frozenset({*map(chr, range(0x20)), "\x7f"})
_OTHERS = "other"  # stands for all characters beyond ASCII
_MAX_COMPOSED = 4  # characters of one composed character; Unicode FAQ on normalization, expansion of NFD in UTF-32

_COMPOSING = frozenset({"NFC", "NFKC"})
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_DROPPING_SPACES = frozenset({"Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBound:
    """What is known of one tokenizer."""

    max_letters: int | None  # ASCII letters and digits of a token, at most; None: letters may vanish
    max_characters: int | None  # of a token, at most; None: characters may vanish
    lost: bytes = b""  # control characters that vanish all the same
    composes: bool = False  # characters may be composed with the marks that follow

    @classmethod
    def of(cls, backend: Backend) -> Self:
        """Read the stages of a tokenizer; any that is unknown leaves nothing certain."""
        unknown = cls(max_letters=None, max_characters=None)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        lost = _lost(backend, vocabulary)
        if lost is None or not _LETTER_SET.isdisjoint(lost):
            return unknown
        added = backend.get_added_tokens_decoder().values()
        normalizer = backend.normalizer
        texts = [*vocabulary]
        if normalizer is not None:  # these are looked for in normalized text
            texts += [normalizer.normalize_str(token.content) for token in added if token.normalized]
        bound = cls(
            max_letters=max(1, *(_num_letters(text.encode("ascii", "ignore")) for text in texts)),
            max_characters=max(1, *map(len, texts)) if _CONTROLS.issuperset(lost) else None,
            lost="".join(sorted(_CONTROLS & lost)).encode(),
        )
        if any(token.lstrip or token.rstrip for token in added):  # they swallow the spaces around them
            bound = replace(bound, max_characters=None)
        for stage in (normalizer, backend.pre_tokenizer):
            for step in () if stage is None else _steps(json.loads(stage.__getstate__())):
                bound = bound.after(step)
        return bound

    def after(self, step: Mapping[str, Any]) -> Self:
        """Return what is still known behind one step of a normalizer or pre-tokenizer."""
        if step["type"] in _COMPOSING:
            return replace(self, composes=True)
        keeps_letters, keeps_all = _keeps(step)
        return replace(
            self,
            max_letters=self.max_letters if keeps_letters else None,
            max_characters=self.max_characters if keeps_all else None,
        )

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least; 0: nothing is known."""
        least, ascii_ = 0, text.encode("ascii", "ignore")
        if self.max_characters is not None:
            num_kept = len(text) - len(ascii_) + len(ascii_.translate(None, self.lost))
            composed = _MAX_COMPOSED if self.composes and not text.isascii() else 1
            least = -(-num_kept // (self.max_characters * composed))
        if self.max_letters is not None:
            num_letters = _num_letters(ascii_)
            if self.composes:  # a letter that vanishes takes at least one mark with it
                num_letters -= len(text) - len(ascii_)
            least = max(least, -(-num_letters // self.max_letters))
        return least


def _keeps(step: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a step keeps each letter, and whether it keeps each character or makes more of it."""
    kind = step["type"]
    if kind in {"Split", "Punctuation"}:
        return (step["behavior"] != "Removed",) * 2
    if kind == "Prepend":
        return (_is_neutral(step["prepend"]),) * 2
    if kind == "Replace":
        old, new = step["pattern"].get("String", ""), step["content"]
        keeps_letters = bool(old) and _LETTER_SET.isdisjoint(old) and _is_neutral(new)
        return keeps_letters, keeps_letters and len(new) >= len(old)
    return kind in _KEEPING | _DROPPING_SPACES, kind in _KEEPING


def _lost(backend: Backend, vocabulary: Mapping[str, int]) -> Set[str] | None:
    """Return ASCII characters that the model drops, or of which it makes one token of many; and `_OTHERS`, if so.

    None: nothing is known of this kind of model.
    """
    model = backend.model
    if isinstance(model, models.BPE):
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        has_bytes = model.byte_fallback
        if model.unk_token in vocabulary and not model.fuse_unk and not has_bytes:
            return frozenset()
    elif isinstance(model, models.Unigram):
        has_bytes = json.loads(model.__getstate__())["byte_fallback"]
    else:
        return None
    if has_bytes and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return frozenset()
    stages = [json.loads(each.__getstate__()) for each in (backend.normalizer, backend.pre_tokenizer) if each]
    if not any(step["type"] == "ByteLevel" for stage in stages for step in _steps(stage)):
        return frozenset({chr(code) for code in range(128)} - vocabulary.keys() | {_OTHERS})
    missing = {byte for byte, letter in enumerate(byte_alphabet()) if letter not in vocabulary}
    others = {_OTHERS} if missing & {*range(0x80, 0xC0)} else set()  # all others have one of these bytes
    return frozenset({chr(byte) for byte in missing if byte < 0x80} | others)


def _num_letters(text: bytes) -> int:
    return len(text) - len(text.translate(None, _LETTERS))


def _is_neutral(text: str) -> bool:
    """Return whether inserting a text leaves all others as they are: no marks, nothing that a model may drop."""
    return text.isprintable() and not any(map(unicodedata.combining, text))


def _steps(stage: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in stage.get("normalizers") or stage.get("pretokenizers") or ():
        yield from _steps(step)
    if stage["type"] != "Sequence":
        yield stage
