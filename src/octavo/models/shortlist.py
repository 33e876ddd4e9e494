"""Which tokens a head drafts from: the first ones of a large vocabulary, as long as few others come.

Tokenizers number their tokens roughly by frequency, and the logits of all of them are most of what a head's pass costs.
A draft that is missing is a rejected one: bytes do not change.
"""

import numpy as np
from numpy.typing import NDArray

_LEAST_VOCAB = 65536  # smaller vocabularies are computed in full
_PARTS = 4
_PANEL = 64  # a size that all kernels can cut a weight at
# Shares of tokens behind the list: from the one on all count, until the other. English text has about 0.1; a pass that
# costs a third pays at one request up to 0.4, at eight up to 0.17.
_MOST_MISSED, _FEW_MISSED = 0.15, 0.12
_FORGET = 0.99  # weight of the past in that share, per token


class Shortlist:
    """How many of a vocabulary's tokens a head computes logits for, learned from the tokens that come."""

    def __init__(self, vocab_size: int) -> None:
        self._is_short = self._can_be = vocab_size >= _LEAST_VOCAB
        self._most = -(-vocab_size // _PARTS // _PANEL) * _PANEL
        self._missed = 0.0

    @property
    def size(self) -> int | None:
        """The first so many tokens; None: all."""
        return self._most if self._is_short else None

    def observe(self, token_ids: NDArray[np.int32]) -> None:
        """Take in tokens [T] that the model has sampled."""
        if not self._can_be or not len(token_ids):
            return
        past = _FORGET ** len(token_ids)
        self._missed = past * self._missed + (1.0 - past) * float((token_ids >= self._most).mean())
        self._is_short = self._missed < (_MOST_MISSED if self._is_short else _FEW_MISSED)
