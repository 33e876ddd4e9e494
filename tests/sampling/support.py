"""Shorthand for sampling tests: rows of logits in, tokens out, the worker's rows made on the way."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.contracts.schedule import Int32Array, TokenMasks
from octavo.kernels.dispatch import native_kernels
from octavo.sampling.native_backend import NativeSamplerBackend
from octavo.sampling.rows import SamplingRows
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.sampling_params import SamplingParams


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], output_index: int = 0) -> SamplerOutput:
    """Sample `logits` [L, V], row j with `params[j]` and no history; seeds default to the row's number.

    By the definition, and by the C++ kernels where they were built: they must say the same.
    """
    rows = SamplingRows(len(params), logits.shape[1], "cpu")
    for row, row_params in enumerate(params):
        seeded = row_params if row_params.seed is not None else row_params.replace(seed=row)
        rows.add(row, seeded, [], [], np.zeros(0, dtype=np.int32), 0)
    row_ids = np.arange(len(params), dtype=np.int32)
    return sample_rows(rows, logits, row_ids, np.full(len(params), output_index, dtype=np.int32))


def sample_rows(
    rows: SamplingRows,
    logits: torch.Tensor,
    row_ids: Int32Array,
    output_indices: Int32Array,
    masks: TokenMasks | None = None,
) -> SamplerOutput:
    """Do what `Sampler.sample` does, in every way that there is, and hold them against one another."""
    output = Sampler(rows).sample(logits, row_ids, output_indices, masks)
    if (native := native_kernels()) is not None:
        other = Sampler(rows, NativeSamplerBackend(native)).sample(logits, row_ids, output_indices, masks)
        is_good = [at for at in range(len(row_ids)) if at not in output.errors]
        assert torch.equal(output.token_ids[is_good], other.token_ids[is_good])
        assert (other.errors, other.logprobs) == (output.errors, output.logprobs)
    return output


def sample_one(logits: Sequence[float], params: SamplingParams, output_index: int = 0) -> int:
    """Sample one row of `logits` [V] alone; it must succeed."""
    output = sample(torch.tensor([logits]), [params], output_index)
    assert not output.errors
    return int(output.token_ids[0])
