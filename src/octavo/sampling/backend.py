"""Selects one token per row: the argmax, or a sample, filtered or not.

Legend: S = rows, V = vocabulary size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import BoolArray, Int32Array
from octavo.sampling.filters import Filters, draw_filtered
from octavo.sampling.mass import relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for_all

# Logits sampled at once. On CPUs, the float64 intermediates of the vocabulary should stay in the cache; filtered rows
# need few of them. On other devices memory is the limit.
_CPU_SLICE, _CPU_FILTERED_SLICE = 2**18, 2**23
_DEVICE_SLICE = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """The result for S rows. Tokens of rows whose maximum logit is not finite are undefined."""

    token_ids: Tensor  # [S] int64
    max_logit: Tensor  # [S] float32; NaN if any logit is NaN


class SamplerBackend(Protocol):
    """A sampler backend. All backends return the same tokens as `TorchSamplerBackend`."""

    def draw(self, logits: Tensor, records: NDArray[np.void], output_indices: Int32Array) -> SampledTokens:
        """Sample from each row of `logits` [S, V] float32 as `records` [S] say, for output tokens `output_indices` [S].

        Ties go to the lowest id. For records, see `sampling/rows.py`.
        """
        ...


class TorchSamplerBackend:
    """The reference backend (see `SamplerBackend`): torch ops, on any device with float64."""

    def draw(self, logits: Tensor, records: NDArray[np.void], output_indices: Int32Array) -> SampledTokens:
        max_logit, token_ids = logits.max(-1)  # on ties, max returns the lowest id
        is_drawn = (records["temperature"] != 0.0) & max_logit.isfinite().cpu().numpy()
        on_cpu, is_filtered = logits.device.type == "cpu", records["is_filtered"]
        for is_alike, cpu_slice in (
            (is_drawn & is_filtered, _CPU_FILTERED_SLICE),
            (is_drawn & ~is_filtered, _CPU_SLICE),
        ):
            for part in slices_of(is_alike, (cpu_slice if on_cpu else _DEVICE_SLICE) // logits.shape[1]):
                metadata = _SamplingMetadata.of(records[part], output_indices[part], logits.device)
                token_ids[part] = _draw(take_rows(logits, part), metadata)
        return SampledTokens(token_ids=token_ids, max_logit=max_logit)


def slices_of(is_wanted: BoolArray, size: int) -> Iterator[NDArray[np.int64]]:
    """Split the positions where `is_wanted` [S] is true into slices of at least 1 and at most `size`."""
    positions, size = is_wanted.nonzero()[0], max(1, size)
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def take_rows(logits: Tensor, part: NDArray[np.int64]) -> Tensor:
    """Return rows of `logits` [S, V] by index: a view if they are contiguous."""
    is_run = part[-1] - part[0] + 1 == len(part)
    return logits[part[0] : part[-1] + 1] if is_run else logits[part]


@dataclass(frozen=True, kw_only=True, slots=True)
class _SamplingMetadata:
    """Sampling metadata of S rows on the device: all of them filtered, or none."""

    is_filtered: bool
    filters: Filters  # [S] each
    keys: NoiseKeys  # [S] each

    @classmethod
    def of(cls, records: NDArray[np.void], output_indices: Int32Array, device: torch.device) -> Self:
        """Gather from the rows' records [S], for output tokens `output_indices` [S]."""

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.copy()).to(device)  # torch ignores the strides of a record field

        return cls(
            is_filtered=bool(records["is_filtered"][0]),
            filters=Filters(
                temperatures=column(records["temperature"]),
                top_k=column(records["top_k"]),
                top_p=column(records["top_p"]),
                min_p=column(records["min_p"]),
            ),
            keys=NoiseKeys(
                seed_low=column(records["seed_low"]),
                seed_high=column(records["seed_high"]),
                output_indices=column(output_indices.astype(np.int64)),
            ),
        )


def _draw(logits: Tensor, metadata: _SamplingMetadata) -> Tensor:
    """Return an int64 token [S] for each row of `logits` [S, V]; every maximum must be finite."""
    if metadata.is_filtered:
        return draw_filtered(logits, metadata.filters, metadata.keys)
    scores = relative_logits(logits, metadata.filters.temperatures)  # [S, V]
    scores += gumbel_for_all(metadata.keys, logits.shape[1])
    return scores.argmax(-1)
