"""Rounds a weight to two-level integers so that its outputs change as little as possible, rather than each weight.

The error from rounding one input's weights is compensated by inputs that have not been rounded yet (GPTQ: Frantar
et al. 2022, arXiv:2210.17323). Integers are those of `kernels/quantization.py` `IntegerFormat`, two-level. Weights are
transposed meanwhile, so that an input's weights are contiguous.

Legend: N = outputs, K = inputs, whole groups of 32.
"""

import torch
import torch.nn.functional as F

from octavo.kernels.quantization import TWO_LEVEL_GROUP_SIZE, IntegerFormat, QuantizedWeight

_GROUP = TWO_LEVEL_GROUP_SIZE
_DAMPING = 0.01  # of the mean of the diagonal, added to it: the fewer the tokens, the more it matters
# The largest value of a group is scaled to one of these multiples of the step; beyond 8 it is clipped.
_REACHES = (6.5, 7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0)
_VANISHING = 1e-30


def round_to_two_level(weight: torch.Tensor, gram: torch.Tensor, form: IntegerFormat) -> QuantizedWeight:
    """Round weight [N, in_size] to a two-level form, given x.T @ x of its inputs, both rotated as the form is."""
    in_size = weight.shape[1]
    padding = -in_size % _GROUP
    largest = weight.abs().amax(1).clamp(min=_VANISHING)  # [N]
    rest = torch.zeros(in_size + padding, len(weight))  # [K, N]: yet to be rounded, in steps of 8 bits
    torch.mul(weight.T, 127.0 / largest, out=rest[:in_size])
    factor = _compensation(F.pad(gram, (0, padding, 0, padding)))  # [K, K]
    values = torch.empty(rest.shape, dtype=torch.int8)
    multipliers = torch.empty(len(rest) // _GROUP, rest.shape[1], dtype=torch.int8)
    for start in range(0, len(rest), _GROUP):
        stop = start + _GROUP
        of_group = _multipliers(rest[start:stop], factor.diagonal()[start:stop])  # [N]
        multipliers[start // _GROUP] = of_group
        steps = _inverse(of_group)
        nearest, errors = torch.empty(2, _GROUP, rest.shape[1])
        for row in range(start, stop):
            before, here = row - start, rest[row]
            here.addmv_(errors[:before].T, factor[start:row, row], alpha=-1.0)
            torch.mul(here, steps, out=nearest[before]).round_().clamp_(-8.0, 7.0)
            meant = (nearest[before] * of_group).add_(4.0).mul_(0.125).floor_()  # in steps of 8 bits
            torch.sub(here, meant, out=errors[before]).div_(factor[row, row])
        values[start:stop] = nearest
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)
    return QuantizedWeight(
        format=form,
        values=values[:in_size].T.contiguous(),
        scales=largest[:, None] / 127.0,
        multipliers=multipliers.T.contiguous(),
    )


def _compensation(gram: torch.Tensor) -> torch.Tensor:
    """Return U [K, K], upper triangular: the inverse of the damped Gram matrix is U.T @ U.

    With its rows and columns in reverse order, the matrix is L @ L.T. In order again, L is the inverse of U.
    """
    scaled = gram / gram.diagonal().mean().clamp(min=_VANISHING)
    identity = torch.eye(len(gram))
    damping = _DAMPING
    while True:
        lower, failure = torch.linalg.cholesky_ex((scaled + damping * identity).flip(0, 1))
        if not failure:
            inverse: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return inverse
        damping *= 10.0


def _multipliers(group: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """Return the best of some multipliers [N] of a group [32, N]; errors are weighted by `diagonal` [32] of U."""
    low, high = group.amin(0), group.amax(0)
    extreme = torch.where(-low > high, low, high)  # [N]
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    weights = diagonal.square().reciprocal()
    for reach in _REACHES:
        multiplier = (extreme * (-8.0 / reach)).round_().clamp_(-127.0, 127.0)
        integers = (group * _inverse(multiplier)).round_().clamp_(-8.0, 7.0)
        # The value of 4-bit integers is rounded once more, which is a small error in comparison.
        error = weights @ integers.mul_(multiplier / 8.0).sub_(group).square_()
        is_better = error < least
        best, least = torch.where(is_better, multiplier, best), torch.where(is_better, error, least)
    return best


def _inverse(multipliers: torch.Tensor) -> torch.Tensor:
    """Return the factors [N] from steps of 8 bits to steps of 4 bits; zeros where a group vanishes."""
    return torch.where(multipliers == 0.0, 0.0, 8.0 / multipliers)
