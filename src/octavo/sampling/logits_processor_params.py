"""One row's logits processors in list form, as sent to a device. Legend: V = vocabulary size."""

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.contracts.schedule import Int32Array
from octavo.sampling_params import SamplingParams

_WORD_BITS = 32


class LogitsProcessorParams:
    """The logits processors of one row, except penalties. Immutable."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self._params, self._stop_token_ids, self._vocab_size = params, list(stop_token_ids), vocab_size
        self._bad_words = [tuple(word) for word in bad_words_token_ids]
        self._words: dict[bool, Int32Array | None] = {}  # of `allowed_words`, by whether min_tokens is not reached yet

    @property
    def bias(self) -> Mapping[int, float]:
        """Values added to logits, by token id."""
        return self._params.logit_bias or {}

    @property
    def long_bad_words(self) -> list[tuple[int, ...]]:
        """Bad words of several tokens, whose ban depends on the preceding tokens."""
        return [word for word in self._bad_words if len(word) > 1]

    def allowed_words(self, output_index: int) -> Int32Array | None:
        """Return the allowed tokens for output `output_index` as a bit mask [V / 32]; None: all are allowed."""
        is_early = output_index < self._params.min_tokens
        if is_early not in self._words:
            self._words[is_early] = self._make_words(is_early=is_early)
        return self._words[is_early]

    def _make_words(self, *, is_early: bool) -> Int32Array | None:
        allowed = self._params.allowed_token_ids
        banned = [word[0] for word in self._bad_words if len(word) == 1]
        banned += self._stop_token_ids if is_early else []
        if allowed is None and not banned:
            return None
        bits = np.full(-(-self._vocab_size // _WORD_BITS) * _WORD_BITS, allowed is None)
        bits[list(allowed or ())] = True
        bits[banned] = False
        words: Int32Array = np.packbits(bits, bitorder="little").view(np.int32)
        return words
