"""The sampler: one token per row of logits, as a pure function of the row.

Order: penalties, logit bias, masks (the grammar's last), temperature, top-k, top-p, min-p; then the argmax of log p +
Gumbel noise, which is an exact sample from p (Maddison, Tarlow and Minka, "A* sampling", 2014). Temperature 0 is the
argmax without noise.

Legend: L = logits rows of the step, S = rows of one slice, M = rows with a grammar, V = vocabulary size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array, TokenMasks
from octavo.sampling.backend import SamplerBackend, TorchSamplerBackend, slices_of
from octavo.sampling.grammar import GrammarBans
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rows import SamplingRows

_PROCESSED_SLICE = 2**23  # logits copied at once for logits processors


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """One token per row of logits. If `errors` has an entry, that row failed on its own and its token is undefined."""

    token_ids: Tensor  # [L] int64
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in L, for rows with logprobs
    errors: dict[int, str] = field(default_factory=dict)  # by position in L


class Sampler:
    """Samples tokens for the rows of a `SamplingRows`. Stateless."""

    def __init__(self, rows: SamplingRows, backend: SamplerBackend | None = None) -> None:
        """Sample with the backend `backend`; None: the reference."""
        self._rows, self._backend = rows, backend or TorchSamplerBackend()

    def sample(
        self,
        logits: Tensor,
        row_ids: Int32Array,
        output_indices: Int32Array,
        masks: TokenMasks | None = None,
        drafts_before: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> SamplerOutput:
        """Select a token for each row of `logits` [L, V] float32; the logits are not modified.

        Row j belongs to the worker's row `row_ids[j]` and samples that request's output token number
        `output_indices[j]`, after the row's known tokens and the drafts `drafts_before[j]`, if any. `masks` restrict
        rows with a grammar.
        """
        bans = None if masks is None else GrammarBans(masks, len(row_ids))
        on_device = logits.to(self._rows.device)
        records = self._rows.records(row_ids)
        step = _Step(self._rows, self._backend, on_device, row_ids, output_indices, bans, drafts_before, records)
        step.draw_changed()
        return SamplerOutput(token_ids=step.token_ids, logprobs=step.rate_all(), errors=step.errors)

    def guess(
        self,
        logits: Tensor,
        row_ids: Int32Array,
        output_indices: Int32Array,
        drafts_before: Mapping[int, Sequence[int]],
        *,
        with_processors: bool,
    ) -> Tensor:
        """Return tokens [L] that `sample` may select from other logits for the same rows and outputs, with their noise.

        No masks, logprobs or errors: where logits are not finite, it may be any token.
        """
        records = self._rows.records(row_ids)
        if not with_processors:
            records["has_processors"] = False
        on_device = logits.to(self._rows.device)
        step = _Step(self._rows, self._backend, on_device, row_ids, output_indices, None, drafts_before, records)
        step.draw_changed()
        return step.token_ids.clamp(0, logits.shape[1] - 1)

    def guesses_by_argmax(self, row_ids: Int32Array, *, with_processors: bool) -> bool:
        """Return whether `guess` would return the argmax for these rows."""
        records = self._rows.records(row_ids)
        is_drawn = records["temperature"] != 0.0
        return not (is_drawn | records["has_processors"] if with_processors else is_drawn).any()

    def needs_argmax_only(self, row_ids: Int32Array, masks: TokenMasks | None = None) -> bool:
        """Return whether these rows need nothing but the argmax, so the logits need not be written out."""
        return masks is None and self._rows.need_argmax_only(row_ids)

    def take_argmax(self, max_logit: Tensor, token_ids: Tensor) -> SamplerOutput:
        """Do what `sample` does, given the maximum logits [L] and their tokens [L] of rows with `needs_argmax_only`."""
        errors = {at: why_not(float(max_logit[at])) for at in _not_finite(max_logit)}
        return SamplerOutput(token_ids=token_ids.to(self._rows.device), errors=errors)


class _Step:
    """One call of the sampler: its inputs and results."""

    def __init__(
        self,
        rows: SamplingRows,
        backend: SamplerBackend,
        logits: Tensor,
        row_ids: Int32Array,
        output_indices: Int32Array,
        bans: GrammarBans | None,
        drafts_before: Mapping[int, Sequence[int]],
        records: NDArray[np.void],
    ) -> None:
        self._drafts_before, self._records = drafts_before, records  # [L]
        self._rows, self._backend, self._logits = rows, backend, logits
        self._row_ids, self._output_indices, self._bans = row_ids, output_indices, bans
        self._is_changed = (
            self._records["has_processors"] if bans is None else self._records["has_processors"] | bans.is_banning
        )
        self.errors: dict[int, str] = {}
        unchanged = self._records.copy()
        unchanged["temperature"][self._is_changed] = 0.0  # for now, only check that their maximum is finite
        drawn = backend.draw(logits, unchanged, output_indices)
        self.token_ids = drawn.token_ids  # [L]
        self._check(np.arange(len(row_ids)), drawn.max_logit)

    def draw_changed(self) -> None:
        """Sample rows with logits processors or masks, unless they have failed."""
        is_wanted = self._is_changed.copy()
        is_wanted[list(self.errors)] = False
        for part in slices_of(is_wanted, _PROCESSED_SLICE // self._logits.shape[1]):
            drawn = self._backend.draw(self._processed(part), self._records[part], self._output_indices[part])
            self.token_ids[part] = drawn.token_ids
            self._check(part, drawn.max_logit)

    def rate_all(self) -> dict[int, TokenLogprobs]:
        """Return the logprobs of every row that requested them and has a token."""
        counts = self._records["num_logprobs"]
        return {
            at: token_logprobs(self._logits[at], int(self.token_ids[at]), int(counts[at]))
            for at in (counts >= 0).nonzero()[0].tolist()
            if at not in self.errors
        }

    def _processed(self, part: NDArray[np.int64]) -> Tensor:
        """Return a copy of the rows' logits [S, V] with logits processors and masks applied."""
        logits = self._logits[part]
        for at in self._records["has_processors"][part].nonzero()[0].tolist():
            processors = self._rows.processors_of(int(self._row_ids[part[at]]))
            processors.apply(
                logits[at], int(self._output_indices[part[at]]), self._drafts_before.get(int(part[at]), ())
            )
        if self._bans is not None:
            self._bans.apply(logits, part)
        return logits

    def _check(self, part: NDArray[np.int64], max_logit: Tensor) -> None:
        """Record an error for each row whose maximum logit `max_logit` [S] is not finite."""
        for at in _not_finite(max_logit):
            self.errors[int(part[at])] = why_not(float(max_logit[at]))


def _not_finite(max_logit: Tensor) -> list[int]:
    positions: list[int] = np.flatnonzero(~np.isfinite(max_logit.numpy(force=True))).tolist()
    return positions


def why_not(max_logit: float) -> str:
    """Return why a row whose maximum logit is not finite has no token."""
    if np.isnan(max_logit):
        return "the model's logits contain NaN"
    if max_logit > 0:
        return "the model's logits contain infinity"
    return (
        "no token is allowed: allowed_token_ids, bad_words, logit_bias, min_tokens and structured_output together "
        "ban every token"
    )
