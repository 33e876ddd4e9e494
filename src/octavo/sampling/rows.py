"""What the worker's rows ask of the sampler, and what one step samples from.

Legend: N = rows in the worker, L = rows of logits in this step, V = vocabulary size, W = words of a mask, B = biases,
H = bad words of several tokens, K = tokens of the longest one minus 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array, TokenMasks
from octavo.sampling.draw import SamplingMetadata
from octavo.sampling.filters import MAX_VOCAB_SIZE
from octavo.sampling.logits_processors import Arrays
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
        ("num_prompt_tokens", np.int64),
        ("is_filtered", np.bool_),
        ("has_processors", np.bool_),
        ("needs_argmax_only", np.bool_),  # needs nothing but the argmax
    ]
)
_COLUMNS = [field.name for field in fields(SamplingMetadata) if field.name in (_ROW_FIELDS.names or ())]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ends: argmax per row, or a sampled token per row.

    Sampling has optional parts, which cost nothing unless a row of the step uses them.
    """

    kind: Literal["argmax", "drawn"]
    has_processors: bool = False  # penalties, biases, bans, masks
    is_filtered: bool = False
    is_rated: bool = False  # with log-probabilities


ARGMAX = Ending("argmax")


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
        self.biased: NDArray[np.int64] = np.array(list(biases), dtype=np.int64)  # [B]
        self.biases: NDArray[np.float32] = np.array(list(biases.values()), dtype=np.float32)  # [B]
        long = [word for word in bad_words_token_ids if len(word) > 1]
        self.bad_lens: NDArray[np.int64] = np.array([len(word) - 1 for word in long], dtype=np.int64)  # [H]
        self.bad_tokens = np.zeros((len(long), self.bad_lens.max(initial=0)), dtype=np.int64)  # [H, K], padded
        for row, word in zip(self.bad_tokens, long, strict=True):
            row[: len(word) - 1] = word[:-1]
        self.banned: NDArray[np.int64] = np.array([word[-1] for word in long], dtype=np.int64)  # [H]
        self._always_banned = [word[0] for word in bad_words_token_ids if len(word) == 1]
        self._masks: dict[bool, Int32Array | None] = {}  # by whether `min_tokens` is not reached yet

    def mask(self, output_index: int) -> Int32Array | None:
        """Return the allowed tokens for output `output_index` as bits [W]; None: all are allowed."""
        is_early = output_index < self._params.min_tokens
        if is_early not in self._masks:
            allowed, words = self._params.allowed_token_ids, None
            banned = [*self._always_banned, *(self._stop_token_ids if is_early else ())]
            if allowed is not None or banned:
                bits = np.full(-(-self._vocab_size // 32) * 32, allowed is None)
                bits[list(allowed or ())] = True
                bits[banned] = False
                words = np.packbits(bits, bitorder="little").view(np.int32)
            self._masks[is_early] = words
        return self._masks[is_early]


class SamplingRows:
    """What each row asks for: one record, and `LogitsProcessorParams` for rows that have any."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {vocab_size} could overflow the sums of top-p"
        self.vocab_size = vocab_size
        self.records = np.zeros(max_num_rows, dtype=_ROW_FIELDS)  # [N]
        self.processors: dict[int, LogitsProcessorParams] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        num_prompt_tokens: int,
    ) -> None:
        """Initialize `row` for a request. Its seed must be set."""
        assert params.seed is not None, "the input processor gives every request a seed"
        self.processors.pop(row, None)
        if params.changes_logits or bad_words_token_ids:
            stop_token_ids = self._sampleable([*eos_token_ids, *params.stop_token_ids])
            bad_words = [word for word in bad_words_token_ids if self._sampleable(word[-1:])]
            self.processors[row] = LogitsProcessorParams(params, stop_token_ids, bad_words, self.vocab_size)
        top_k = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.records[row] = (
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
            num_prompt_tokens,
            top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0,
            row in self.processors,
            params.temperature == 0.0 and row not in self.processors and params.logprobs is None,
        )

    def step(self, rows: Int32Array, num_tokens: Int32Array, masks: TokenMasks | None = None) -> "StepSampling":
        """Gather what `rows` [L] ask for, of which `num_tokens` [L] are known; `masks` come with the step."""
        by_row = {} if masks is None else dict(zip(masks.logits_rows.tolist(), masks.words, strict=True))
        is_argmax = not by_row and bool(self.records["needs_argmax_only"][rows].all())
        return StepSampling(self, rows, num_tokens, by_row, None if is_argmax else self.records[rows])

    def unverified_step(self, rows: Int32Array, num_tokens: Int32Array, *, with_processors: bool) -> "StepSampling":
        """Gather it for tokens that are to be verified: no masks, no logprobs, perhaps no logits processors."""
        records = self.records[rows]
        records["num_logprobs"] = -1
        records["has_processors"] &= with_processors
        return StepSampling(self, rows, num_tokens, records=records)

    def _sampleable(self, token_ids: Sequence[int]) -> list[int]:
        """Drop ids that have no logit: a tokenizer may have more tokens than its model."""
        return [token_id for token_id in token_ids if token_id < self.vocab_size]


class StepSampling:
    """What L rows of logits ask for. `arrays` are empty if all of them are plain argmax."""

    def __init__(
        self,
        source: SamplingRows,
        rows: Int32Array,
        num_tokens: Int32Array,
        masks: Mapping[int, Int32Array] = MappingProxyType({}),
        records: NDArray[np.void] | None = None,
    ) -> None:
        """`masks` are by index in L; `records` [L] of the rows, None: all rows are plain argmax."""
        self.rows, self.num_tokens = rows, num_tokens  # [L] each; a row's tokens include those to verify before it
        self.vocab_size = source.vocab_size
        self._source, self._masks, self._records = source, masks, records
        self.ending = ARGMAX
        if records is None:
            return
        self.is_rated = records["num_logprobs"] >= 0  # [L]
        self.is_processed = records["has_processors"].copy()  # [L]
        self.is_processed[list(masks)] = True
        is_drawn = records["temperature"] != 0.0
        ending = Ending(
            "drawn",
            has_processors=bool(self.is_processed.any()),
            is_filtered=bool((records["is_filtered"] & is_drawn).any()),
            is_rated=bool(self.is_rated.any()),
        )
        if ending != Ending("drawn") or is_drawn.any():
            self.ending = ending

    @property
    def num_logprobs(self) -> NDArray[np.int64]:
        """By row [L]; -1: none."""
        return np.full(len(self.rows), -1) if self._records is None else self._records["num_logprobs"]

    @property
    def has_penalties(self) -> bool:
        records = self._records
        if records is None:
            return False
        is_penalized = (records["repetition"] != 1.0) | (records["presence"] != 0.0) | (records["frequency"] != 0.0)
        return bool((is_penalized & records["has_processors"]).any())

    @cached_property
    def arrays(self) -> tuple[Arrays, Arrays]:
        """The columns [L] of `SamplingMetadata`, and the arrays of `LogitsProcessorTensors` if the step has any."""
        if self._records is None or self.ending == ARGMAX:
            return {}, {}
        records, size = self._records, len(self.rows)
        output_indices = self.num_tokens - records["num_prompt_tokens"]
        processors: Arrays = {}
        if self.ending.has_processors:
            own = [
                self._source.processors[row] if has_own else None
                for row, has_own in zip(self.rows.tolist(), records["has_processors"].tolist(), strict=True)
            ]
            masks = [self._masks.get(at) for at in range(size)]
            processors = processor_arrays(own, output_indices, masks, self.vocab_size)
        columns = {name: records[name].copy() for name in _COLUMNS}  # copies: torch cannot read the strides of a field
        columns["output_indices"] = output_indices
        columns["mask_indices"] = processors.pop("mask_indices", np.full(size, -1))
        return columns, processors

    def part(self, at: NDArray[np.intp]) -> "StepSampling":
        """Return some of the rows [.] in L."""
        assert self._records is not None, "argmax rows are not divided"
        masks = {index: self._masks[old] for index, old in enumerate(at.tolist()) if old in self._masks}
        return StepSampling(self._source, self.rows[at], self.num_tokens[at], masks, self._records[at])


def processor_arrays(
    processors: Sequence[LogitsProcessorParams | None],
    output_indices: NDArray[np.int64],
    masks: Sequence[Int32Array | None],
    vocab_size: int,
) -> Arrays:
    """Return the arrays of `LogitsProcessorTensors`, and `mask_indices` [L], for rows with these, [L] each.

    `masks` come with the step and apply in addition to the rows' own.
    """
    words: list[Int32Array] = []
    indices = np.full(len(masks), -1, dtype=np.int64)
    asking: list[tuple[int, LogitsProcessorParams]] = []
    for at, (asked, index, allowed) in enumerate(zip(processors, output_indices.tolist(), masks, strict=True)):
        if asked is not None:
            asking.append((at, asked))
            own = asked.mask(index)
            allowed = own if allowed is None else allowed if own is None else own & allowed[: len(own)]  # noqa: PLW2901
        if allowed is not None:
            indices[at] = len(words)
            words.append(allowed)
    num_words, bad = -(-vocab_size // 32), [(at, asked) for at, asked in asking if len(asked.banned)]
    longest = max((asked.bad_tokens.shape[1] for _, asked in bad), default=0)
    padded = [np.pad(asked.bad_tokens, ((0, 0), (0, longest - asked.bad_tokens.shape[1]))) for _, asked in bad]
    return {
        "mask_indices": indices,
        "masks": np.stack([each[:num_words] for each in words]) if words else np.zeros((0, num_words), np.int32),
        "biased": _joined([at * vocab_size + asked.biased for at, asked in asking], np.int64),
        "biases": _joined([asked.biases for _, asked in asking], np.float32),
        "bad_rows": _joined([np.full(len(asked.banned), at) for at, asked in bad], np.int64),
        "bad_lens": _joined([asked.bad_lens for _, asked in bad], np.int64),
        "bad_tokens": np.concatenate(padded) if padded else np.zeros((0, 0), dtype=np.int64),
        "banned": _joined([at * vocab_size + asked.banned for at, asked in bad], np.int64),
    }


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype=dtype)
