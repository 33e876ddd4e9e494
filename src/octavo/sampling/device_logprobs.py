"""Log-probabilities in two parts: reductions on the device, and the final arithmetic on the host one step later.

Bit-identical to `logprobs.py`: the device returns integers and unmodified logits.

Legend: L = logits rows of the step, V = vocabulary size, K = maximum number of top tokens reported.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.kernels.dispatch import uses_triton
from octavo.sampling.mass import log_of_mass, masses, relative_logits
from octavo.sampling_params import MAX_LOGPROBS

RATING_SIZE = 3 + MAX_LOGPROBS
_LOW, _LAST_ID = 2**32, 2**31 - 1


def rate_on_device(logits: Tensor, max_logit: Tensor, token_ids: Tensor, is_wanted: Tensor) -> Tensor:
    """Return [L, 3 + K] int64: total mass, rank and key of the sampled token, keys of the top tokens, best first.

    logits [L, V] are the model's, float32; max_logit [L] are their maxima; token_ids [L] int64. Rows where is_wanted
    [L] int64 is negative, or where the maximum is not finite, are undefined. Keys: see `_keys`.
    """
    if not uses_triton(logits.device, logits.dtype):
        return rate_by_torch(logits, token_ids)
    from octavo.kernels.triton.logits import rate

    chosen, count = logits.gather(1, token_ids[:, None]), min(MAX_LOGPROBS, logits.shape[1])
    return _joined(*rate(logits, max_logit, chosen[:, 0], is_wanted, count), _keys(chosen, token_ids[:, None]))


def rate_by_torch(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Do the same for all rows with torch ops. The specification of the Triton kernel."""
    chosen, count = logits.gather(1, token_ids[:, None]), min(MAX_LOGPROBS, logits.shape[1])
    totals, ranks = masses(relative_logits(logits)).sum(-1), (logits > chosen).sum(-1) + 1
    likeliest = _keys(logits, torch.arange(logits.shape[1], device=logits.device)).topk(count).values
    return _joined(totals, ranks, likeliest, _keys(chosen, token_ids[:, None]))


def _joined(totals: Tensor, ranks: Tensor, likeliest: Tensor, keys: Tensor) -> Tensor:
    """Join totals and ranks [L], top tokens' keys (at most K) and sampled tokens' keys [L, 1] into [L, 3 + K]."""
    rating = torch.cat((totals[:, None], ranks[:, None], keys, likeliest), dim=-1)
    return torch.nn.functional.pad(rating, (0, RATING_SIZE - rating.shape[1]))


def read_rating(rating: NDArray[np.int64], max_logit: float, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """Read one row of `rate_on_device` [3 + K], whose maximum logit is finite."""
    total, rank, *keys = rating[: 3 + min(num_logprobs, vocab_size)].tolist()
    relative = np.array([_logit(key >> 32) - max_logit for key in keys])
    return TokenLogprobs(
        token_ids=[_LAST_ID - key % _LOW for key in keys],
        logprobs=(relative - log_of_mass(total)).astype(np.float32).tolist(),
        rank=rank,
    )


def _keys(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 keys that sort like logits, ties by ascending id. Both arguments are [L, K] or broadcast."""
    bits = logits.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits) * _LOW + (_LAST_ID - token_ids)


def _logit(place: int) -> float:
    """Convert the upper half of a key back to its float32 logit."""
    return float(np.array(place if place >= 0 else -(2**31) - place, dtype=np.int64).astype(np.int32).view(np.float32))
