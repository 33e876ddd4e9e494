"""Log-probabilities of the model's own distribution: raw logits, before penalties, bias, masks and temperature.

The normaliser is a sum of integers (`mass.py`) and all else is element-wise, so a row's bits do not depend on the
batch that it is in.

Legend: L = logits rows, V = vocabulary size, K = tokens reported beside the one that stands there.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.contracts.engine import TokenLogprobs
from octavo.errors import RequestError
from octavo.sampling.mass import log_of_mass, masses, relative_logits


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """Rate the tokens of one request's prompt: `logits[j]` [L, V] predict `target_ids[j]` [L].

    Raises:
        RequestError: when a row holds NaN, or nothing finite.
    """
    finite = logits.amax(-1).isfinite()
    if not bool(finite.all()):
        raise RequestError(f"the model gave no finite logits at {int((~finite).sum())} positions of the prompt")
    return [
        token_logprobs(row, token_id, num_logprobs) for row, token_id in zip(logits, target_ids.tolist(), strict=True)
    ]


def token_logprobs(logits: Tensor, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Rate `token_id` and the `num_logprobs` most likely tokens under `logits` [V], whose largest is finite."""
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
    """Return the `count` ids of largest `logits` [V], best first, equal ones in the order of their ids.

    `topk` alone leaves the order of equals open, and which of them it returns.
    """
    if count == 0:
        return ()
    least = logits.topk(min(count, len(logits))).values[-1]
    candidates = (logits >= least).nonzero()[:, 0]  # ascending ids, `count` of them or, with equals, more
    order = logits[candidates].argsort(descending=True, stable=True)
    ids: list[int] = candidates[order][:count].tolist()
    return ids
