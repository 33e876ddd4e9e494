"""Which captured graph serves a step of pure decoding: sizes in buckets, so that a few graphs serve all steps."""

from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

_Kind = Literal["argmax", "drawn"]
_PARTS = ("has_processors", "is_filtered", "is_rated")

_FEW = (1, 2, 4)
_SMALL_STEP, _SMALL_MAX = 8, 128  # rows
_LARGE_STEP = 16
_SHORTEST_CONTEXT = 512  # tokens


@dataclass(frozen=True, slots=True)
class Ending:
    """What a step ends with: the largest logit of each row, or a token drawn for each row.

    A draw has parts, which cost nothing where no row of a step wants them.
    """

    kind: _Kind
    has_processors: bool = False  # penalties, biases, bans, masks
    is_filtered: bool = False
    is_rated: bool = False  # with log-probabilities

    def words(self) -> list[str]:
        """Return the kind and the parts: what `of_words` reads."""
        return [self.kind, *(part for part in _PARTS if getattr(self, part))]

    @classmethod
    def of_words(cls, words: list[str]) -> Self:
        """Return the ending of these words.

        Raises:
            ValueError, TypeError: it is none.
        """
        kind, *parts = words
        if kind not in get_args(_Kind) or not set(parts) <= set(_PARTS):
            raise ValueError(f"{words} is no ending")
        return cls(cast(_Kind, kind), **dict.fromkeys(parts, True))


ARGMAX = Ending("argmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """One graph: for up to `num_rows` rows, whose contexts have up to `max_context` tokens."""

    num_rows: int
    max_context: int
    ending: Ending


def row_bucket(num_rows: int) -> int:
    """Return how many rows a step of `num_rows` is padded to: 1, 2, 4, then steps of 8, past 128 of 16."""
    for size in _FEW:
        if num_rows <= size:
            return size
    step = _SMALL_STEP if num_rows <= _SMALL_MAX else _LARGE_STEP
    return -(-num_rows // step) * step


def context_bucket(num_tokens: int, max_model_len: int) -> int:
    """Return the bound on contexts that a graph is made for: 512 times a power of two, at most the model's own.

    Kernels that split a context launch for the bound, and what lies behind a row's own end stops at once. A single
    bound would launch for a context that hardly any request has.
    """
    bound = _SHORTEST_CONTEXT
    while bound < num_tokens:
        bound *= 2
    return min(bound, max_model_len)
