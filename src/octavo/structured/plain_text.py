"""The tokenizer that spells text which a grammar forces: in ordinary tokens, even where it reads like a special token.

llguidance spells forced text with the `tokenizers` library, which would read `<think>` in a user's string as the token
of that name. No grammar allows that token there, so nothing could follow. Only a tokenizer of the caller's own, written
in Python, can be told to read special tokens as text; it is called for forced text alone.
"""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from tokenizers import Tokenizer

_SPECIAL = b"\xff"  # the library's mark of tokens that text cannot produce


class _Spelling:
    """What `TokenizerWrapper` expects of a tokenizer: token bytes by id, and a function from text to ids."""

    bos_token_id = None

    def __init__(self, library: LLTokenizer, tokenizer: Tokenizer) -> None:
        self.eos_token_id = library.eos_token
        self.tokens = [_bytes_of(library, token_id) for token_id in range(library.vocab_size)]
        self._special = frozenset(filter(library.is_special_token, range(library.vocab_size)))
        self._library, self._tokenizer = library, tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # the wrapper's question whether bytes are accepted, too
            raise TypeError("text is expected")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._special.isdisjoint(ids):
            return ids
        return self._library.greedy_tokenize(text)  # the vocabulary proper has a piece of that name, too


def plain_text_tokenizer(tokenizer_json: str, size: int, end_token_ids: Sequence[int] | None) -> TokenizerWrapper:
    """Return a tokenizer for `LLTokenizer` with `size` tokens that spells all text in ordinary tokens.

    Raises:
        ValueError: the library does not support this kind of tokenizer.
    """
    ends = None if end_token_ids is None else list(end_token_ids)
    library = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=ends, slices=[])
    tokenizer = Tokenizer.from_str(json.dumps(_without_lead(json.loads(tokenizer_json), library)))
    tokenizer.encode_special_tokens = True
    return TokenizerWrapper(_Spelling(library, tokenizer))


def _bytes_of(library: LLTokenizer, token_id: int) -> bytes:
    text = library.decode_bytes([token_id])
    if library.is_special_token(token_id):
        return _SPECIAL + text
    return b"" if text == b"<[%d]>" % token_id else text  # how the library shows an id without a token


def _without_lead(tree: dict[str, Any], library: LLTokenizer) -> dict[str, Any]:
    """Change a `tokenizer.json` so that text does not begin with an added space, as the library does.

    What the library takes for special, such as `<think>`, must be marked as special.
    """
    for token in tree.get("added_tokens") or []:
        token["special"] = library.is_special_token(token["id"])
    tree["normalizer"] = _without_prepend(tree.get("normalizer"))
    for step in _steps(tree.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "never"
    return tree


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    inner = [kept for step in normalizer["normalizers"] if (kept := _without_prepend(step)) is not None]
    return {"type": "Sequence", "normalizers": inner} if inner else None


def _steps(node: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer, of nested sequences too."""
    if node is None:
        return []
    return [step for inner in node[name] for step in _steps(inner, name)] if node["type"] == "Sequence" else [node]
