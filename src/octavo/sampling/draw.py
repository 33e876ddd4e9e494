"""Draws one token per row: the argmax, or an exact sample from what the filters leave.

`draw` is defined by torch's ops on any device with float64, without synchronizing; C++ kernels on a CPU and Triton's on
a GPU return the same tokens, faster. All per-row parameters are in tensors, so the code can be captured.

Legend: L = rows of logits, S = rows of one slice, V = vocabulary size.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.dispatch import uses_triton
from octavo.kernels.native import DRAW_ROW, NativeKernels
from octavo.sampling.filters import relative_logits, rows_at_once, thresholds
from octavo.sampling.noise import gumbel_noise


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMetadata:
    """Sampling metadata on the device: tensors [L], float64 for floats and int64 for everything else."""

    temperature: Tensor  # 0: argmax, ties go to the lowest id
    seed_low: Tensor
    seed_high: Tensor
    output_indices: Tensor
    top_k: Tensor  # V: off
    top_p: Tensor
    min_p: Tensor
    num_logprobs: Tensor  # -1: no logprobs
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    num_prompt_tokens: Tensor
    mask_indices: Tensor  # into `LogitsProcessorTensors.masks`; -1: all tokens are allowed

    def rows(self, rows: Tensor | slice) -> "SamplingMetadata":
        """Return some of the rows."""
        return SamplingMetadata(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTEGER_COLUMNS = tuple(field.name for field in fields(SamplingMetadata) if field.name not in FLOAT_COLUMNS)


def draw(
    logits: Tensor, metadata: SamplingMetadata, *, is_filtered: bool, native: NativeKernels | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's maximum logit [L] and its sampled token [L] int64; logits are [L, V] float32.

    Filters are applied only if `is_filtered`. The maximum is NaN if any logit is; tokens of rows whose maximum is not
    finite are undefined.
    """
    if native is not None:
        return _draw_natively(logits, metadata, native)
    max_logit, token_ids = logits.max(-1)  # on ties, max returns the lowest id
    if uses_triton(logits.device, logits.dtype):
        drawn = _draw_by_triton(logits, max_logit, metadata, is_filtered=is_filtered)
        return max_logit, torch.where(metadata.temperature > 0.0, drawn, token_ids)
    step = rows_at_once(logits)
    for part in (slice(start, start + step) for start in range(0, len(logits), step)):
        drawn = draw_by_torch(logits[part], metadata.rows(part), is_filtered=is_filtered)
        token_ids[part] = torch.where(metadata.temperature[part] > 0.0, drawn, token_ids[part])
    return max_logit, token_ids


def draw_by_torch(logits: Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> Tensor:
    """Sample from logits [S, V]. The specification of all kernels; rows with temperature 0 are undefined."""
    temperature = metadata.temperature.masked_fill(metadata.temperature == 0.0, 1.0)
    scores = relative_logits(logits, temperature)  # [S, V]
    scores += gumbel_noise(metadata.seed_low, metadata.seed_high, metadata.output_indices, logits.shape[1])
    if is_filtered:
        least = thresholds(logits, temperature, metadata.top_k, metadata.top_p, metadata.min_p)
        scores.masked_fill_(logits < least[:, None], -torch.inf)
    return scores.argmax(-1)


def _draw_by_triton(logits: Tensor, max_logit: Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> Tensor:
    from octavo.kernels.triton import draw as kernel

    least = log_min_p = None
    if is_filtered:
        least = kernel.thresholds(logits, max_logit, metadata.temperature, metadata.top_k, metadata.top_p)
        log_min_p = metadata.min_p.log()
    keys = metadata.seed_low, metadata.seed_high, metadata.output_indices
    return kernel.draw(logits, max_logit, metadata.temperature, *keys, least, log_min_p)


def _draw_natively(logits: Tensor, metadata: SamplingMetadata, native: NativeKernels) -> tuple[Tensor, Tensor]:
    """Rows that the kernels are not sure of, about one in 10^8, are drawn again as specified."""
    token_ids, max_logit = native.draw(logits, draw_rows(metadata))
    if len(unsure := (token_ids.numpy() < 0).nonzero()[0]):
        rows = torch.from_numpy(unsure)
        token_ids[rows] = draw(logits[rows], metadata.rows(rows), is_filtered=True)[1]
    return max_logit, token_ids


def draw_rows(metadata: SamplingMetadata) -> NDArray[np.void]:
    """Convert the sampling metadata of L rows to the C++ kernels' layout."""
    wanted = np.zeros(len(metadata.temperature), dtype=DRAW_ROW)
    for name in ("temperature", "top_p", "top_k", "seed_low", "seed_high"):
        wanted[name] = getattr(metadata, name).numpy()
    wanted["output_index"] = metadata.output_indices.numpy()
    # torch's log, so that the bits min-p compares with are those of the specification.
    wanted["log_min_p"] = metadata.min_p.log().numpy()
    return wanted
