"""Probability mass in integers: sums that do not depend on the order of summation, so neither do results.

Legend: R = rows, V = vocabulary size.
"""

import math

import torch
from torch import Tensor

MASS_BITS = 44  # the most likely token weighs 2^44
MAX_VOCAB_SIZE = 2 ** (63 - MASS_BITS) - 1  # beyond it a sum could overflow int64


def relative_logits(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Return logits relative to the row's largest, divided by its temperature: [R, V] -> float64 [R, V], at most 0.

    The largest is subtracted first, so no temperature, however small, can overflow.
    """
    relative = logits.double()
    relative -= logits.amax(-1, keepdim=True)
    if temperatures is not None:
        relative /= temperatures[:, None]
    return relative


def masses(relative: Tensor) -> Tensor:
    """Return exp of relative logits in fixed point: float64 [...] -> int64 [...], 0 to 2^44.

    Tokens below 2^-44 of the most likely weigh nothing; together they are under 2^-25 of the whole for any vocabulary.
    """
    return (relative.exp() * 2.0**MASS_BITS).to(torch.int64)


def log_of_mass(mass: int) -> float:
    """Return the natural logarithm of a mass, as a factor of the most likely token's."""
    return math.log(mass) - MASS_BITS * math.log(2.0)
