"""One row's logits processors in list form, as sent to a device.

Legend: V = vocabulary size, B = biases, H = bad words of several tokens, K = tokens of the longest one minus 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array
from octavo.sampling_params import SamplingParams

_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LongBadWords:
    """Bad words of several tokens, whose ban depends on the preceding tokens."""

    lens: NDArray[np.int64]  # [H], number of tokens except the last
    tokens: NDArray[np.int64]  # [H, K], zeros behind the end
    last: NDArray[np.int64]  # [H]

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "LongBadWords":
        lens = np.array([len(word) - 1 for word in words], dtype=np.int64)
        tokens = np.zeros((len(words), lens.max(initial=0)), dtype=np.int64)
        for row, word in zip(tokens, words, strict=True):
            row[: len(word) - 1] = word[:-1]
        return cls(lens=lens, tokens=tokens, last=np.array([word[-1] for word in words], dtype=np.int64))


class LogitsProcessorParams:
    """The logits processors of one row, except penalties. Immutable: steps copy its arrays as they are."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self._params, self._stop_token_ids, self._vocab_size = params, list(stop_token_ids), vocab_size
        biases = params.logit_bias or {}
        self.biased_ids: NDArray[np.int64] = np.array(list(biases), dtype=np.int64)  # [B]
        self.biases: NDArray[np.float32] = np.array(list(biases.values()), dtype=np.float32)  # [B]
        self.long_bad_words = LongBadWords.of([word for word in bad_words_token_ids if len(word) > 1])
        self._banned = [word[0] for word in bad_words_token_ids if len(word) == 1]
        self._words: dict[bool, Int32Array | None] = {}  # of `allowed_words`, by whether min_tokens is not reached yet

    def allowed_words(self, output_index: int) -> Int32Array | None:
        """Return the allowed tokens for output `output_index` as a bit mask [V / 32]; None: all are allowed."""
        is_early = output_index < self._params.min_tokens
        if is_early not in self._words:
            self._words[is_early] = self._make_words(is_early=is_early)
        return self._words[is_early]

    def _make_words(self, *, is_early: bool) -> Int32Array | None:
        allowed = self._params.allowed_token_ids
        banned = [*self._banned, *(self._stop_token_ids if is_early else ())]
        if allowed is None and not banned:
            return None
        bits = np.full(-(-self._vocab_size // _WORD_BITS) * _WORD_BITS, allowed is None)
        bits[list(allowed or ())] = True
        bits[banned] = False
        words: Int32Array = np.packbits(bits, bitorder="little").view(np.int32)
        return words
