"""Log-probabilities under the model: raw logits, before penalties, bias, masks and temperature.

The normalizer is a sum of integers (`mass.py`) and everything else is element-wise, so the result is batch-invariant.

Legend: L = logits rows, V = vocabulary size, K = top tokens reported in addition to the actual one.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.errors import RequestError
from octavo.sampling.mass import log_of_mass, masses, relative_logits


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """Return logprobs of the tokens of one request's prompt: `logits[j]` [L, V] predict `target_ids[j]` [L].

    Raises:
        RequestError: a row contains NaN or has no finite logit.
    """
    finite = logits.amax(-1).isfinite()
    if not bool(finite.all()):
        raise RequestError(f"the model's logits are not finite at {int((~finite).sum())} positions of the prompt")
    return [
        token_logprobs(row, token_id, num_logprobs) for row, token_id in zip(logits, target_ids.tolist(), strict=True)
    ]


def token_logprobs(logits: Tensor, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Return logprobs of `token_id` and of the `num_logprobs` top tokens of `logits` [V], whose maximum is finite."""
    relative = relative_logits(logits[None, :])  # [1, V]
    log_total = log_of_mass(int(masses(relative).sum()))
    token_ids = [token_id, *_most_likely(logits, num_logprobs)]
    logprobs = relative[0, token_ids].cpu().numpy() - log_total  # [1 + K]
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=logprobs.astype(np.float32).tolist(),
        rank=int((logits > logits[token_id]).sum()) + 1,
    )


def _most_likely(logits: Tensor, count: int) -> Sequence[int]:
    """Return the ids of the `count` largest `logits` [V] in descending order, ties by ascending id.

    `topk` alone specifies neither which of equal logits it returns nor in what order.
    """
    if count == 0:
        return ()
    least = logits.topk(min(count, len(logits))).values[-1]
    candidates = (logits >= least).nonzero()[:, 0]  # ascending ids; more than `count` if there are ties
    order = logits[candidates].argsort(descending=True, stable=True)
    ids: list[int] = candidates[order][:count].tolist()
    return ids
