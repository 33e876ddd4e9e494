"""Rotations of the inputs of linear layers, before activations and weights are quantized.

Rows of activations have outliers. With one scale per row, everything else would be rounded away. An orthogonal matrix R
spreads each outlier over other inputs and leaves the product unchanged: (x R) (W R)^T = x W^T (QuaRot: Ashkboos et al.
2024, arXiv:2404.00456). Every element is a series of sums and differences in a fixed order, so all kernels get the same
bits.

Legend: K = inputs.
"""

import math
from typing import Literal

import torch
from torch import Tensor

ROTATION_BLOCK = 64  # inputs
Rotation = Literal["blocks", "row"]


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Multiply x [..., K] float32 by an orthogonal matrix that mixes each whole block of 64; the rest is unchanged.

    With "row", blocks are then mixed with each other, as far as their number has factors of 2 and 3. It is a fast
    Walsh-Hadamard transform, in steps of 1, 2, 4, ...; then, for each factor of 3, the reflection that subtracts two
    thirds of the sum of three blocks from each. The matrix is its own inverse.
    """
    size = x.shape[-1] // ROTATION_BLOCK * ROTATION_BLOCK
    mixed, rest = x[..., :size], x[..., size:]
    step = 1
    while step < ROTATION_BLOCK:
        mixed, step = _sums_and_differences(mixed, step), step * 2
    mixed = mixed / ROTATION_BLOCK**0.5
    if rotation == "row" and size > 0:
        mixed = _mix_blocks(mixed)
    return torch.cat((mixed, rest), dim=-1)


def mixing_scale(size: int) -> float:
    """Return the factor that preserves the norm of a row of `size` inputs when its blocks are mixed."""
    num_blocks = max(1, size // ROTATION_BLOCK)
    powers, threes = num_blocks & -num_blocks, 1
    while num_blocks // powers // threes % 3 == 0:
        threes *= 3
    return 1.0 / (math.sqrt(powers) * threes)


def _mix_blocks(x: Tensor) -> Tensor:
    """Mix all blocks of x [..., K], K a multiple of 64."""
    size, step = x.shape[-1], ROTATION_BLOCK
    mixed = x
    while size // step % 2 == 0:
        mixed, step = _sums_and_differences(mixed, step), step * 2
    while size // step % 3 == 0:
        thirds = mixed.reshape(*x.shape[:-1], -1, 3, step).unbind(-2)  # [..., K / (3 * step), step] each
        twice = thirds[0] + thirds[1] + thirds[2]
        twice = twice + twice
        mixed, step = torch.stack([twice - (of + of + of) for of in thirds], dim=-2).flatten(-3), step * 3
    return mixed * mixing_scale(size)


def _sums_and_differences(x: Tensor, step: int) -> Tensor:
    first, second = x.reshape(*x.shape[:-1], -1, 2, step).unbind(-2)  # [..., K / (2 * step), step] each
    return torch.stack((first + second, first - second), dim=-2).flatten(-3)
