"""Probability mass in integers, and the filters top-k, top-p and min-p as one threshold per row.

Sums of integers do not depend on the order of summation, so neither do results. Each filter keeps all tokens above some
logit, so together they are one threshold.

Legend: R = rows, V = vocabulary size.
"""

import math

import torch
from torch import Tensor

MASS_BITS = 44  # the most likely token has mass 2^44
MAX_VOCAB_SIZE = 2 ** (63 - MASS_BITS) - 1  # beyond that, a sum could overflow int64


def rows_at_once(logits: Tensor) -> int:
    """Return how many rows to process at once: float64 intermediates fit the cache of a CPU, or 0.5 GB of a device."""
    return max(1, (2**18 if logits.device.type == "cpu" else 2**23) // logits.shape[1])


def relative_logits(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return logits minus the row's maximum, divided by its temperature: [R, V] -> float64 [R, V], at most 0.

    The maximum is subtracted first, so even tiny temperatures cannot overflow.
    """
    relative = logits.double()
    relative -= logits.amax(-1, keepdim=True)
    if temperature is not None:
        relative /= temperature[:, None]
    return relative


def masses(relative: Tensor) -> Tensor:
    """Return exp of relative logits in fixed point: float64 [...] -> int64 [...], 0 to 2^44.

    Tokens below 2^-44 of the most likely one have no mass; together they are below 2^-25 of the total for any
    vocabulary.
    """
    return (relative.exp() * 2.0**MASS_BITS).to(torch.int64)


def log_of_mass(mass: int) -> float:
    """Return the natural logarithm of a mass relative to that of the most likely token."""
    return math.log(mass) - MASS_BITS * math.log(2.0)


def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest logit of each row that passes all filters [R]; logits [R, V], filters [R] each.

    Sorts whole rows and does not synchronize. Equal logits pass or fail together. Results of rows with NaN are unused.
    """
    ordered = logits.topk(logits.shape[1]).values  # [R, V], descending
    relative = relative_logits(ordered, temperature)
    end_of_top_k = _logit_at(ordered, top_k)  # [R]
    # Top-p keeps the tokens with less than p of the mass above them; 100 % is what top-k leaves.
    mass = masses(relative).masked_fill_(ordered < end_of_top_k[:, None], 0)
    wanted = (top_p * mass.sum(-1).double()).ceil().to(torch.int64)
    above = mass.cumsum(-1) - mass
    num_in_top_p = ((above < wanted[:, None]) | (top_p == 1.0)[:, None]).sum(-1)
    num_in_min_p = (relative >= min_p.log()[:, None]).sum(-1)
    return torch.maximum(_logit_at(ordered, torch.minimum(num_in_top_p, num_in_min_p)), end_of_top_k)


def _logit_at(ordered: Tensor, counts: Tensor) -> Tensor:
    """Return the logit of the `counts`-th most likely token, counted from 1: [R, V], [R] -> [R]."""
    return ordered.gather(-1, (counts - 1).clamp(0, ordered.shape[1] - 1)[:, None]).squeeze(-1)
