"""The scores of a SentencePiece tokenizer's tokens, which a GGUF file has instead of merges.

Legend: `backend` is the JSON of a tokenizer of the `tokenizers` library.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.tokenizer.gguf import SPACE, merges_by_score

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREFIX = {"type": "Prepend", "prepend": SPACE}
_NORMALIZERS = (
    _SPACES,
    {"type": "Sequence", "normalizers": [_SPACES]},
    {"type": "Sequence", "normalizers": [_PREFIX, _SPACES]},
)
# Splitting at spaces does nothing: they have become something else before.
_PRE_TOKENIZERS = (
    None,
    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
)


def token_scores(backend: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the scores of tokens that merges make; None: not a SentencePiece BPE, or scores cannot say its merges."""
    model = backend["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    if backend["normalizer"] not in _NORMALIZERS or backend["pre_tokenizer"] not in _PRE_TOKENIZERS:
        return None
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    said = merges_by_score(tokens, [scores.get(token, -float(len(merges))) for token in tokens])
    # The order of merges that make the same token is free.
    is_same = set(said) == set(merges) and [*_made(said)] == [*_made(merges)]
    return scores if is_same else None


def _made(merges: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the tokens that merges make."""
    return ("".join(merge) for merge in merges)


def has_space_prefix(backend: Mapping[str, Any]) -> bool:
    """Return whether a text gets a space before its first word."""
    return _PREFIX in backend["normalizer"].get("normalizers", [])
