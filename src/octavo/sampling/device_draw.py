"""Samples a token for each row on the device, without synchronizing with the host.

The result equals the `Sampler`'s row by row. All per-row parameters are in tensors, so the code can be captured.

Legend: L = logits rows of the step, S = rows of one slice, V = vocabulary size.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo.kernels.dispatch import uses_triton
from octavo.sampling.filters import Filters, thresholds
from octavo.sampling.mass import relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for_all

_SLICE = 2**23  # logits processed at once: their float64 intermediates take about 0.5 GB


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMetadata:
    """Sampling metadata on the device: tensors [L], float64 for floats and int64 for everything else."""

    temperatures: Tensor  # 0: argmax, ties go to the lowest id
    seed_low: Tensor
    seed_high: Tensor
    output_indices: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_logprobs: Tensor  # -1: no logprobs
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    num_prompt_tokens: Tensor
    mask_indices: Tensor  # into `LogitsProcessorTensors.masks`; -1: all tokens are allowed

    @property
    def keys(self) -> NoiseKeys:
        return NoiseKeys(seed_low=self.seed_low, seed_high=self.seed_high, output_indices=self.output_indices)

    def take(self, rows: slice) -> "SamplingMetadata":
        """Return a range of rows."""
        return SamplingMetadata(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


FLOAT_COLUMNS = ("temperatures", "top_p", "min_p", "repetition", "presence", "frequency")
INTEGER_COLUMNS = tuple(field.name for field in fields(SamplingMetadata) if field.name not in FLOAT_COLUMNS)


def draw_on_device(logits: Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> tuple[Tensor, Tensor]:
    """Return each row's maximum logit [L] and its sampled token [L] int64; logits are [L, V] float32.

    Filters are applied only if `is_filtered`. Tokens of rows whose maximum logit is not finite are undefined.
    """
    max_logit, tokens = logits.max(-1)
    if uses_triton(logits.device, logits.dtype):
        drawn = _draw_by_triton(logits, max_logit, metadata, is_filtered=is_filtered)
        return max_logit, torch.where(metadata.temperatures > 0.0, drawn, tokens)
    rows_at_once = max(1, _SLICE // logits.shape[1])
    for start in range(0, len(logits), rows_at_once):
        part = slice(start, start + rows_at_once)
        drawn = _draw_by_torch(logits[part], metadata.take(part), is_filtered=is_filtered)
        tokens[part] = torch.where(metadata.temperatures[part] > 0.0, drawn, tokens[part])
    return max_logit, tokens


def _draw_by_triton(logits: Tensor, max_logit: Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> Tensor:
    from octavo.kernels.triton import draw

    least = log_min_p = None
    if is_filtered:
        least = draw.thresholds(logits, max_logit, metadata.temperatures, metadata.top_k, metadata.top_p)
        log_min_p = metadata.min_p.log()
    keys = metadata.seed_low, metadata.seed_high, metadata.output_indices
    return draw.draw(logits, max_logit, metadata.temperatures, *keys, least, log_min_p)


def _draw_by_torch(logits: Tensor, metadata: SamplingMetadata, *, is_filtered: bool) -> Tensor:
    """Sample from logits [S, V]. Results of rows with temperature 0 are undefined."""
    temperatures = metadata.temperatures.masked_fill(metadata.temperatures == 0.0, 1.0)
    scores = relative_logits(logits, temperatures)  # [S, V]
    scores += gumbel_for_all(metadata.keys, logits.shape[1])
    if is_filtered:
        filters = Filters(temperatures=temperatures, top_k=metadata.top_k, top_p=metadata.top_p, min_p=metadata.min_p)
        scores.masked_fill_(logits < thresholds(logits, filters)[:, None], -torch.inf)
    return scores.argmax(-1)
