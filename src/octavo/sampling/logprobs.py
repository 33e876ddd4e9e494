"""Log-probabilities under the model: of raw logits, before penalties, bias, masks and temperature.

In two parts: reductions where the logits are, and the final arithmetic on the host, perhaps one step later. The
normalizer is a sum of integers and everything else is element-wise, so the result is batch-invariant.

Legend: L = rows of logits, V = vocabulary size, K = maximum number of top tokens reported.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.errors import RequestError
from octavo.kernels.dispatch import uses_triton
from octavo.sampling.filters import log_of_mass, masses, relative_logits, rows_at_once
from octavo.sampling_params import MAX_LOGPROBS

RATING_SIZE = 3 + MAX_LOGPROBS
_LOW, _LAST_ID = 2**32, 2**31 - 1


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_logprobs: int) -> Sequence[TokenLogprobs]:
    """Return logprobs of the tokens of one request's prompt: `logits[j]` [L, V] predict `target_ids[j]` [L].

    Raises RequestError: a row contains NaN or has no finite logit.
    """
    max_logit = logits.amax(-1)
    if not bool((finite := max_logit.isfinite()).all()):
        raise RequestError(f"the model's logits are not finite at {int((~finite).sum())} positions of the prompt")
    ratings = rate(logits, max_logit, target_ids, torch.full_like(target_ids, num_logprobs), num_logprobs)
    return [
        read_rating(rating, peak, num_logprobs, logits.shape[1])
        for rating, peak in zip(ratings.cpu().numpy(), max_logit.tolist(), strict=True)
    ]


def rate(logits: Tensor, max_logit: Tensor, token_ids: Tensor, is_wanted: Tensor, most: int | None = None) -> Tensor:
    """Return [L, 3 + K] int64: total mass, rank and key of the sampled token, keys of the top tokens, best first.

    logits [L, V] are the model's, float32; max_logit [L] are their maxima; token_ids [L] int64. Rows where is_wanted
    [L] int64 is negative, or where the maximum is not finite, are undefined. If no row wants more than `most`, torch's
    ops may fill in no more; None: nobody knows, and nothing synchronizes.
    """
    if not uses_triton(logits.device, logits.dtype):
        size = rows_at_once(logits)
        parts = zip(torch.split(logits, size), torch.split(token_ids, size), strict=True)
        return torch.cat([rate_by_torch(some, tokens, most) for some, tokens in parts])
    from octavo.kernels.triton.logits import rate as kernel

    chosen = logits.gather(1, token_ids[:, None])
    parts_of_rows = kernel(logits, max_logit, chosen[:, 0], is_wanted, min(MAX_LOGPROBS, logits.shape[1]))
    return _joined(*parts_of_rows, _keys(chosen, token_ids[:, None]))


def rate_by_torch(logits: Tensor, token_ids: Tensor, most: int | None = None) -> Tensor:
    """Do the same for all rows with torch ops. The specification of the Triton kernel."""
    chosen = logits.gather(1, token_ids[:, None])
    totals, ranks = masses(relative_logits(logits)).sum(-1), (logits > chosen).sum(-1) + 1
    if most:
        likeliest = torch.stack([_likeliest(row, min(most, len(row))) for row in logits])
    elif most == 0:
        likeliest = token_ids.new_zeros(len(logits), 0)
    else:
        keys = _keys(logits, torch.arange(logits.shape[1], device=logits.device))
        likeliest = keys.topk(min(MAX_LOGPROBS, logits.shape[1])).values
    return _joined(totals, ranks, likeliest, _keys(chosen, token_ids[:, None]))


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest keys of a row [V]: those of candidates, as keys of all tokens take twice the time."""
    candidates = (~(logits < logits.topk(count).values[-1])).nonzero()[:, 0]  # more than `count` if there are ties
    return _keys(logits[candidates], candidates).topk(count).values


def _joined(totals: Tensor, ranks: Tensor, likeliest: Tensor, keys: Tensor) -> Tensor:
    """Join totals and ranks [L], top tokens' keys (at most K) and sampled tokens' keys [L, 1] into [L, 3 + K]."""
    rating = torch.cat((totals[:, None], ranks[:, None], keys, likeliest), dim=-1)
    return torch.nn.functional.pad(rating, (0, RATING_SIZE - rating.shape[1]))


def read_rating(rating: NDArray[np.int64], max_logit: float, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """Read one row of `rate` [3 + K], whose maximum logit is finite."""
    keys, total = rating[2 : 3 + min(num_logprobs, vocab_size)], int(rating[0])
    bits = keys >> 32  # see `_keys`
    logits = np.where(bits < 0, -(2**31) - bits, bits).astype(np.int32).view(np.float32).astype(np.float64)
    return TokenLogprobs(
        token_ids=(_LAST_ID - keys % _LOW).tolist(),
        logprobs=(logits - max_logit - log_of_mass(total)).astype(np.float32).tolist(),
        rank=int(rating[1]),
    )


def _keys(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return int64 keys that sort like logits, ties by ascending id. Both arguments are [L, K] or broadcast."""
    bits = logits.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits) * _LOW + (_LAST_ID - token_ids)
