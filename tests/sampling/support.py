"""Shorthand for sampling tests: rows of logits in, tokens out, the worker's rows made on the way."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.sampling.rows import SamplingRows
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.sampling_params import SamplingParams


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], output_index: int = 0) -> SamplerOutput:
    """Sample `logits` [L, V], row j with `params[j]` and no history; seeds default to the row's number."""
    rows = SamplingRows(len(params), logits.shape[1], "cpu")
    for row, row_params in enumerate(params):
        seeded = row_params if row_params.seed is not None else row_params.replace(seed=row)
        rows.add(row, seeded, [], [], np.zeros(0, dtype=np.int32), 0)
    row_ids = np.arange(len(params), dtype=np.int32)
    return Sampler(rows).sample(logits, row_ids, np.full(len(params), output_index, dtype=np.int32))


def sample_one(logits: Sequence[float], params: SamplingParams, output_index: int = 0) -> int:
    """Sample one row of `logits` [V] alone; it must succeed."""
    output = sample(torch.tensor([logits]), [params], output_index)
    assert not output.errors
    return int(output.token_ids[0])
