"""Probability mass in integers: sums do not depend on the order of summation, so neither do results.

Legend: R = rows, V = vocabulary size.
"""

import math

import torch
from torch import Tensor

MASS_BITS = 44  # the most likely token has mass 2^44
MAX_VOCAB_SIZE = 2 ** (63 - MASS_BITS) - 1  # beyond that, a sum could overflow int64


def relative_logits(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Return logits minus the row's maximum, divided by its temperature: [R, V] -> float64 [R, V], at most 0.

    The maximum is subtracted first, so even tiny temperatures cannot overflow.
    """
    relative = logits.double()
    relative -= logits.amax(-1, keepdim=True)
    if temperatures is not None:
        relative /= temperatures[:, None]
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
