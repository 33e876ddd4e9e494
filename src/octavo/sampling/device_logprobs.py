"""Log-probabilities in two halves: what the device adds up and finds, and what the host reads of it, a step later.

The result is that of `logprobs.py`, to the bit: integers come from the device, and logits as they were.

Legend: L = logits rows of the step, V = vocabulary size, K = most tokens reported beside the one that stands there.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.kernels.triton.selection import uses_triton
from octavo.sampling.mass import log_of_mass, masses, relative_logits
from octavo.sampling_params import MAX_LOGPROBS

RATING_SIZE = 3 + MAX_LOGPROBS
_LOW, _LAST_ID = 2**32, 2**31 - 1


def rate_on_device(logits: Tensor, largest: Tensor, token_ids: Tensor, is_wanted: Tensor) -> Tensor:
    """Return [L, 3 + K] int64: mass of the row, rank and key of its token, keys of the likeliest tokens, best first.

    logits are the model's [L, V] float32, largest [L] of them, token_ids [L] int64. Rows where is_wanted [L] int64 is
    below 0, or where the largest is not finite, get anything. Keys: see `_keys`.
    """
    if not uses_triton(logits.device, logits.dtype):
        return rate_by_torch(logits, token_ids)
    from octavo.kernels.triton.rate import rate

    chosen, count = logits.gather(1, token_ids[:, None]), min(MAX_LOGPROBS, logits.shape[1])
    return _joined(*rate(logits, largest, chosen[:, 0], is_wanted, count), _keys(chosen, token_ids[:, None]))


def rate_by_torch(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The same of all rows, by torch's operations: what Triton's kernel must give, too."""
    chosen, count = logits.gather(1, token_ids[:, None]), min(MAX_LOGPROBS, logits.shape[1])
    totals, ranks = masses(relative_logits(logits)).sum(-1), (logits > chosen).sum(-1) + 1
    likeliest = _keys(logits, torch.arange(logits.shape[1], device=logits.device)).topk(count).values
    return _joined(totals, ranks, likeliest, _keys(chosen, token_ids[:, None]))


def _joined(totals: Tensor, ranks: Tensor, likeliest: Tensor, keys: Tensor) -> Tensor:
    """Return [L, 3 + K] of totals and ranks [L], keys of the likeliest, as many as there are, and of tokens [L, 1]."""
    rating = torch.cat((totals[:, None], ranks[:, None], keys, likeliest), dim=-1)
    return torch.nn.functional.pad(rating, (0, RATING_SIZE - rating.shape[1]))


def read_rating(rating: NDArray[np.int64], largest: float, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """Read one row of `rate_on_device` [3 + K], whose largest logit is finite."""
    total, rank, *keys = rating[: 3 + min(num_logprobs, vocab_size)].tolist()
    relative = np.array([_logit(key >> 32) - largest for key in keys])
    return TokenLogprobs(
        token_ids=[_LAST_ID - key % _LOW for key in keys],
        logprobs=(relative - log_of_mass(total)).astype(np.float32).tolist(),
        rank=rank,
    )


def _keys(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 in the order of logits; of equal ones the lowest id is the largest. Both are [L, K] or broadcast."""
    bits = logits.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits) * _LOW + (_LAST_ID - token_ids)


def _logit(place: int) -> float:
    """Return the float32 number at this place in the order of numbers."""
    return float(np.array(place if place >= 0 else -(2**31) - place, dtype=np.int64).astype(np.int32).view(np.float32))
