"""The sampler's state of each of the worker's rows, from the step that adds a row to the step that frees it.

Legend: N = rows in the worker, L = logits rows of this step, V = vocabulary size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.sampling.logits_processor_params import LogitsProcessorParams
from octavo.sampling.logits_processors import RowLogitsProcessors
from octavo.sampling.mass import MAX_VOCAB_SIZE
from octavo.sampling_params import SamplingParams

_ROW_FIELDS = np.dtype(
    [
        ("seed_low", np.int64),
        ("seed_high", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),  # V: off
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("num_logprobs", np.int64),  # -1: none
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("is_filtered", np.bool_),
        ("has_processors", np.bool_),
        ("needs_argmax_only", np.bool_),  # needs nothing but the argmax
    ]
)


class SamplingRows:
    """Sampling state by row. A row without logits processors is one record; other rows also have a
    `RowLogitsProcessors`.

    With `processors_on_device`, `device_logits_processors.py` counts tokens instead. `device` is where sampling
    happens: the logits' device, or the CPU if that has no float64 (mps).
    """

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device | str, *, processors_on_device: bool = False
    ) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {vocab_size} could overflow the sums of top-p"
        asked = torch.device(device)
        self.device = torch.device("cpu") if asked.type == "mps" else asked
        self.vocab_size = vocab_size
        self._records = np.zeros(max_num_rows, dtype=_ROW_FIELDS)  # [N]
        self._processors_on_device = processors_on_device
        self._processor_params: dict[int, LogitsProcessorParams] = {}
        self._processors: dict[int, RowLogitsProcessors] = {}

    def add(
        self,
        row: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        token_ids: Int32Array,
        num_prompt_tokens: int,
    ) -> None:
        """Initialize `row` for a request with `token_ids` [prompt + outputs so far]. Its seed must be set."""
        assert params.seed is not None, "the input processor gives every request a seed"
        self.remove(row)
        if RowLogitsProcessors.are_needed(params, bad_words_token_ids):
            stop_token_ids = self._sampleable([*eos_token_ids, *params.stop_token_ids])
            bad_words = [word for word in bad_words_token_ids if self._sampleable(word[-1:])]
            self._processor_params[row] = LogitsProcessorParams(params, stop_token_ids, bad_words, self.vocab_size)
            if not self._processors_on_device:
                self._processors[row] = RowLogitsProcessors(
                    params, stop_token_ids, bad_words, token_ids, num_prompt_tokens, device=self.device
                )
        top_k = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        is_filtered = top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        self._records[row] = (
            params.seed & 0xFFFFFFFF,
            params.seed >> 32,
            params.temperature,
            top_k,
            params.top_p,
            params.min_p,
            -1 if params.logprobs is None else params.logprobs,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            is_filtered,
            row in self._processor_params,
            params.temperature == 0.0 and row not in self._processor_params and params.logprobs is None,
        )

    def append(self, rows: Int32Array, token_ids: Tensor) -> None:
        """Record that `token_ids[j]` [L] was sampled for row `rows[j]`."""
        if not self._processors:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row in self._processors:
                self._processors[row].append(token_id)

    def remove(self, row: int) -> None:
        """Free a row."""
        self._processor_params.pop(row, None)
        self._processors.pop(row, None)
        self._records[row]["has_processors"] = False

    def need_argmax_only(self, rows: Int32Array) -> bool:
        """Return whether `rows` [L] need nothing but the argmax of their logits."""
        return bool(self._records["needs_argmax_only"][rows].all())

    def records(self, rows: Int32Array) -> NDArray[np.void]:
        """Return the records of `rows` [L], in that order; fields: `_ROW_FIELDS`."""
        return self._records[rows]

    def processor_params_of(self, row: int) -> LogitsProcessorParams:
        """Return the logits processors of `row` in list form; only for rows whose record has `has_processors` set."""
        return self._processor_params[row]

    def processors_of(self, row: int) -> RowLogitsProcessors:
        """Return the logits processors of `row`; only for rows with `has_processors`, and without
        `processors_on_device`.
        """
        return self._processors[row]

    def _sampleable(self, token_ids: Sequence[int]) -> list[int]:
        """Drop ids that have no logit: a tokenizer may have more tokens than its model."""
        return [token_id for token_id in token_ids if token_id < self.vocab_size]
