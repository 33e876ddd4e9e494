"""The last stage on the device: one token for each row of logits, as a pure function of the row.

Order: penalties, logit bias, masks (a grammar's last), temperature, top-k, top-p, min-p; then the arg-max of log p +
Gumbel noise, which is an exact draw from p (Maddison, Tarlow and Minka, "A* sampling", 2014). Temperature 0 is the
arg-max without noise.

Legend: L = logits rows of the step, S = rows of one slice, M = rows under a grammar, V = vocabulary size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import BoolArray, Int32Array, TokenMasks
from octavo.sampling.draw import Wishes, draw
from octavo.sampling.grammar import GrammarBans
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rows import SamplingRows

# Logits drawn at once. On a CPU, float64 intermediates of the whole vocabulary should stay in the cache; filtered rows
# need few. Elsewhere memory is the limit.
_CPU_SLICE, _CPU_FILTERED_SLICE = 2**18, 2**23
_DEVICE_SLICE = 2**26


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """One token per row of logits. Where `errors` has an entry, the row failed alone and its token means nothing."""

    token_ids: Tensor  # [L] int64
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in L, for rows that asked
    errors: dict[int, str] = field(default_factory=dict)  # by position in L


class Sampler:
    """Draws tokens for rows that `SamplingRows` knows. Has no state of its own and changes none."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def sample(
        self, logits: Tensor, row_ids: Int32Array, output_indices: Int32Array, masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """Choose a token for each row of `logits` [L, V] float32.

        Row j belongs to the worker's row `row_ids[j]` and chooses that request's output token number
        `output_indices[j]`. Rows under a grammar find what they may sample in `masks`. The logits are not changed.
        """
        bans = None if masks is None else GrammarBans(masks, row_ids)
        step = _Step(self._rows, logits.to(self._rows.device), row_ids, output_indices, bans)
        step.draw_all()
        return SamplerOutput(token_ids=step.token_ids, logprobs=step.rate_all(), errors=step.errors)

    def takes_largest(self, row_ids: Int32Array, masks: TokenMasks | None = None) -> bool:
        """Say whether all that these rows want of their logits is the largest, so that nobody need write them all."""
        records = self._rows.records(row_ids)
        is_plain = (records["temperature"] == 0.0) & ~records["is_edited"] & (records["num_logprobs"] < 0)
        return masks is None and bool(is_plain.all())

    def takes_plain(self, row_ids: Int32Array, masks: TokenMasks | None = None) -> bool:
        """Say whether all that these rows want is a token: the largest logit's or one drawn from all of them."""
        records = self._rows.records(row_ids)
        is_filtered = records["is_filtered"] & (records["temperature"] != 0.0)
        return masks is None and not (records["is_edited"] | is_filtered | (records["num_logprobs"] >= 0)).any()

    def take_largest(self, largest: Tensor, token_ids: Tensor) -> SamplerOutput:
        """Do what `sample` does, for rows of which `takes_largest` is true: their largest logits [L], and whose [L]."""
        errors = {at: why_not(float(largest[at])) for at in _not_finite(largest)}
        return SamplerOutput(token_ids=token_ids.to(self._rows.device), errors=errors)


class _Step:
    """One call of the sampler: its inputs, and its results as they come."""

    def __init__(
        self,
        rows: SamplingRows,
        logits: Tensor,
        row_ids: Int32Array,
        output_indices: Int32Array,
        bans: GrammarBans | None,
    ) -> None:
        self._rows, self._logits, self._row_ids, self._output_indices = rows, logits, row_ids, output_indices
        self._bans = bans
        self._records = rows.records(row_ids)  # [L]
        self._is_changed = self._records["is_edited"] if bans is None else self._records["is_edited"] | bans.is_banning
        self.errors: dict[int, str] = {}
        largest, self.token_ids = logits.max(-1)  # [L] twice; of equals, max names the lowest id
        self._check(np.arange(len(row_ids)), largest)

    def draw_all(self) -> None:
        """Replace the arg-max by what each row asked for, one kind of row after the other."""
        is_changed, is_filtered = self._is_changed, self._records["is_filtered"]
        is_greedy = self._records["temperature"] == 0.0
        on_cpu = self._logits.device.type == "cpu"
        for is_alike, cpu_slice in (
            (is_greedy & is_changed, _CPU_SLICE),
            (~is_greedy & is_filtered, _CPU_FILTERED_SLICE),
            (~is_greedy & ~is_filtered, _CPU_SLICE),
        ):
            for part in self._slices(is_alike, cpu_slice if on_cpu else _DEVICE_SLICE):
                wishes = Wishes.of(self._records[part], self._output_indices[part], self._logits.device)
                self.token_ids[part] = draw(self._edited(part), wishes)

    def rate_all(self) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities of every row that asked for them and has a token."""
        counts = self._records["num_logprobs"]
        return {
            at: token_logprobs(self._logits[at], int(self.token_ids[at]), int(counts[at]))
            for at in (counts >= 0).nonzero()[0].tolist()
            if at not in self.errors
        }

    def _slices(self, is_wanted: BoolArray, limit: int) -> Iterator[NDArray[np.int64]]:
        """Cut the wanted rows [L], less those that failed, into parts of at most `limit` logits."""
        positions = is_wanted.nonzero()[0]
        if self.errors:
            positions = positions[~np.isin(positions, list(self.errors))]
        size = max(1, limit // self._logits.shape[1])
        for start in range(0, len(positions), size):
            yield positions[start : start + size]

    def _edited(self, part: NDArray[np.int64]) -> Tensor:
        """Return the rows' logits after their edits and bans [S, V]: a copy wherever something is changed."""
        if not self._is_changed[part].any():
            is_run = part[-1] - part[0] + 1 == len(part)
            return self._logits[part[0] : part[-1] + 1] if is_run else self._logits[part]  # neighbours: a view
        logits = self._logits[part]  # a copy
        for at in self._records["is_edited"][part].nonzero()[0].tolist():
            edits = self._rows.edits_of(int(self._row_ids[part[at]]))
            edits.apply(logits[at], int(self._output_indices[part[at]]))
        if self._bans is not None:
            self._bans.apply(logits, part)
        largest = logits.amax(-1)  # [S]
        self._check(part, largest)
        # A row that bans every token has no distribution: a flat one gives it a token, which nobody will read.
        return logits.masked_fill_(largest.isfinite().logical_not_()[:, None], 0.0)

    def _check(self, part: NDArray[np.int64], largest: Tensor) -> None:
        """Note an error for each row whose largest logit, `largest` [S], is not finite."""
        for at in _not_finite(largest):
            self.errors[int(part[at])] = why_not(float(largest[at]))


def _not_finite(largest: Tensor) -> list[int]:
    positions: list[int] = largest.isfinite().logical_not_().nonzero()[:, 0].tolist()
    return positions


def why_not(largest: float) -> str:
    """Say why a row whose largest logit is not finite has no token."""
    if np.isnan(largest):
        return "the model's logits contain NaN"
    if largest > 0:
        return "the model's logits contain infinity"
    return (
        "no token may be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and structured_output together "
        "ban every one"
    )
