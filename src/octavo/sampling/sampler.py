"""The sampler: one token per row of logits, as a pure function of the row.

Order: penalties, logit bias, masks, temperature, top-k, top-p, min-p; then the argmax of log p + Gumbel noise, which is
an exact sample from p (Maddison, Tarlow and Minka, "A* sampling", 2014). Temperature 0 is the argmax without noise.

Legend: L = rows of logits, N = rows of the worker, V = vocabulary size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.native import NativeKernels
from octavo.kernels.reference import Kernels
from octavo.sampling.draw import SamplingMetadata, draw
from octavo.sampling.logits_processors import Context, LogitsProcessorTensors, process_logits
from octavo.sampling.logprobs import RATING_SIZE, rate, read_rating
from octavo.sampling.rows import ARGMAX, Ending, StepSampling

_COPIED_SLICE = 2**23  # logits copied at once on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Results of L rows. If a maximum is not finite, the row has failed and its token is undefined."""

    token_ids: Tensor  # [L] int64
    max_logit: Tensor  # [L] float32, of the model's logits; NaN if any of them is
    max_processed_logit: Tensor  # [L] float32, of the processed logits
    ratings: Tensor | None = None  # [L, .] int64, see `rate`

    @classmethod
    def of_argmax(cls, max_logit: Tensor, token_ids: Tensor) -> Self:
        """Wrap the rows' largest logits [L] and their token ids [L]."""
        return cls(token_ids=token_ids, max_logit=max_logit, max_processed_logit=max_logit)

    def packed(self) -> Tensor:
        """Return [L, 3] int64: tokens, and the bits of both largest logits as float64."""
        floats = (x.to(torch.float64).view(torch.int64) for x in (self.max_logit, self.max_processed_logit))
        return torch.stack((self.token_ids, *floats), dim=-1)


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    ending: Ending,
    context: Context | None,
    processors: LogitsProcessorTensors | None,
    *,
    native: NativeKernels | None = None,
    most_logprobs: int | None = None,
) -> Sampled:
    """Sample a token for each row of logits [L, V] float32, which are not modified; `ending` says what rows ask for.

    It can be captured, unless `most_logprobs` is known.
    """
    left = logits
    if ending.has_processors:
        assert context is not None and processors is not None, "the step has logits processors"  # noqa: PT018 - both
        left = process_logits(logits, metadata, context, processors)
    max_processed_logit, token_ids = draw(left, metadata, is_filtered=ending.is_filtered, native=native)
    max_logit = logits.amax(-1) if ending.has_processors else max_processed_logit
    ratings = None
    if ending.is_rated:
        ratings = rate(logits, max_logit, token_ids, metadata.num_logprobs, most_logprobs)
    return Sampled(token_ids=token_ids, max_logit=max_logit, max_processed_logit=max_processed_logit, ratings=ratings)


class Sampler:
    """Samples for steps of a worker's rows. Stateless.

    On the host, only rows that need it are copied, edited and rated, in slices. A device takes all rows at once.
    """

    def __init__(
        self, token_ids: Tensor, send: Callable[..., list[Tensor]], kernels: Kernels, *, is_queued: bool = False
    ) -> None:
        """`token_ids` [N, .] are those of the rows, `send` copies arrays to their device; native kernels share threads.

        Logits are sampled on the CPU where the device has no float64 (mps).
        """
        self._token_ids, self._is_queued = token_ids, is_queued
        self._is_moved = token_ids.device.type == "mps"
        self._send = _on_host if self._is_moved else send
        self._native: NativeKernels | None = None
        if not is_queued and token_ids.device.type in ("cpu", "mps"):
            self._native = kernels if isinstance(kernels, NativeKernels) else native_kernels()

    def sample(self, logits: Tensor, step: StepSampling) -> Sampled:
        """Sample a token for each row of `logits` [L, V] float32."""
        if self._is_moved:
            logits = logits.cpu()
        if self._is_queued:
            return self._sample(logits, step)
        parts = list(self._parts(step, logits.shape[1]))
        if len(parts) == 1:
            return self._sample(logits, step)
        size, device = len(logits), logits.device
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        max_logit, max_processed_logit = (torch.zeros(size, device=device) for _ in range(2))
        ratings = torch.zeros(size, RATING_SIZE, dtype=torch.int64, device=device) if step.ending.is_rated else None
        for part in parts:
            sampled = self._sample(_rows_of(logits, part), step.part(part))
            token_ids[part], max_logit[part] = sampled.token_ids, sampled.max_logit
            max_processed_logit[part] = sampled.max_processed_logit
            if ratings is not None and sampled.ratings is not None:
                ratings[part] = sampled.ratings
        return Sampled(
            token_ids=token_ids, max_logit=max_logit, max_processed_logit=max_processed_logit, ratings=ratings
        )

    def _sample(self, logits: Tensor, step: StepSampling) -> Sampled:
        if step.ending == ARGMAX:  # as part of a step
            return Sampled.of_argmax(*logits.max(-1))
        columns, arrays = step.arrays
        metadata = SamplingMetadata(**dict(zip(columns, self._send(*columns.values()), strict=True)))
        processors = LogitsProcessorTensors.on_device(arrays, self._send) if arrays else None
        context = self._context(step) if step.ending.has_processors else None
        most = None if self._is_queued else int(step.num_logprobs.max(initial=0))
        return sample(logits, metadata, step.ending, context, processors, native=self._native, most_logprobs=most)

    def _context(self, step: StepSampling) -> Context:
        num_tokens = step.num_tokens.astype(np.int64)
        rows, on_device = self._send(step.rows.astype(np.int64), num_tokens)
        token_ids, most = self._token_ids, int(num_tokens.max(initial=1))
        if self._is_moved:
            token_ids, rows = token_ids[rows.to(token_ids.device), :most].cpu(), torch.arange(len(rows))
        return Context(
            token_ids=token_ids, rows=rows, num_tokens=on_device, max_tokens=most, has_penalties=step.has_penalties
        )

    @staticmethod
    def _parts(step: StepSampling, vocab_size: int) -> Iterator[NDArray[np.intp]]:
        """Divide the rows by what they need; slices of copied rows have at least one."""
        kinds = step.is_processed + 2 * step.is_rated
        for kind in np.unique(kinds):
            at = (kinds == kind).nonzero()[0]
            size = max(1, _COPIED_SLICE // vocab_size) if kind else len(at)
            yield from (at[start : start + size] for start in range(0, len(at), size))


def _rows_of(logits: Tensor, part: NDArray[np.intp]) -> Tensor:
    """Return rows of `logits` [L, V] by index, ascending: a view if they are contiguous."""
    is_run = part[-1] - part[0] + 1 == len(part)
    return logits[part[0] : part[-1] + 1] if is_run else logits[part]


def _on_host(*arrays: NDArray[np.generic]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


class SampledTokens(NamedTuple):
    """Results of L rows on the host."""

    token_ids: Int32Array  # [L]
    logprobs: dict[int, TokenLogprobs]  # by index in L, of rows that asked for some and have a token
    errors: dict[int, str]  # by index in L: why a row has none


def read_now(sampled: Sampled, step: StepSampling) -> SampledTokens:
    """Read results, which waits for them."""
    max_logit = sampled.max_logit.numpy(force=True)
    is_same = sampled.max_processed_logit is sampled.max_logit
    max_processed_logit = max_logit if is_same else sampled.max_processed_logit.numpy(force=True)
    ratings = None if sampled.ratings is None else sampled.ratings.numpy(force=True)
    return read_sampled(step, sampled.token_ids.numpy(force=True), max_logit, max_processed_logit, ratings)


def read_sampled(
    step: StepSampling,
    token_ids: NDArray[np.int64],
    max_logit: NDArray[np.floating[Any]],
    max_processed_logit: NDArray[np.floating[Any]],
    ratings: NDArray[np.int64] | None,
) -> SampledTokens:
    """Read arrays [L]. The model's own logits decide first why a row failed, then the processed ones."""
    errors = {
        at: why_not(float(max_processed_logit[at] if np.isfinite(max_logit[at]) else max_logit[at]))
        for at in (~(np.isfinite(max_logit) & np.isfinite(max_processed_logit))).nonzero()[0].tolist()
    }
    logprobs: dict[int, TokenLogprobs] = {}
    if ratings is not None:
        counts = step.num_logprobs
        for at in (counts >= 0).nonzero()[0].tolist():
            if at not in errors:
                logprobs[at] = read_rating(ratings[at], float(max_logit[at]), int(counts[at]), step.vocab_size)
    return SampledTokens(token_ids.astype(np.int32), logprobs, errors)


def why_not(max_logit: float) -> str:
    """Return why a row whose maximum logit is not finite has no token."""
    if np.isnan(max_logit) or max_logit > 0:
        what = "NaN" if np.isnan(max_logit) else "infinity"
        hint = "in float16, values above 65,504 become infinite: bfloat16 and float32 hold them"
        return f"the model's logits contain {what} ({hint})"
    return (
        "no token is allowed: allowed_token_ids, bad_words, logit_bias, min_tokens and structured_output together "
        "ban every token"
    )
