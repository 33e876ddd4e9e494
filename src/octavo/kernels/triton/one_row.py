"""Linears of a single row with dense weights, where the time is that of reading the weights and of launching.

A program reads whole rows of the weight, once. What stands before the linear is part of it: residual addition and RMS
norm, whose factor is applied to the sums, as the sum of squares is only known at the end; or an activation. The first
weights are on their way before the previous kernel has ended.

Legend: K = inputs, N = outputs.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.overlap import await_previous, overlap
from octavo.kernels.triton.row_ops import activate, aligned, gated, ungated
from octavo.kernels.types import Activation, Fused, PackedLinear


@dataclass(frozen=True, slots=True)
class OneRowTiling:
    """A program's outputs, and the inputs that it reads at a time."""

    outputs: int
    inputs: int
    num_warps: int


# Measured on an H200 (benchmarks/results/). Four outputs give small linears enough programs; where one round of them
# computes everything, a program should have more in flight.
_SHORT, _LONG = OneRowTiling(4, 1024, 4), OneRowTiling(4, 2048, 8)
_MOST_OUTPUTS_OF_LONG = 4096
# Every program computes the activation of the whole row: beyond so many elements in all, a launch of its own is faster.
_MOST_ACTIVATIONS = 3 << 20


@triton.jit
def _part_of_weights(places: tl.tensor, inputs: tl.tensor, in_size: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    if IS_EVEN:
        weights = tl.load(places + inputs[None, :])
    else:
        weights = tl.load(places + inputs[None, :], mask=(inputs < in_size)[None, :], other=0.0)
    return weights


@triton.jit
def _part_of_row(
    x: tl.tensor,
    residual: tl.tensor | None,
    norm_weight: tl.tensor | None,
    total: tl.tensor | None,
    inputs: tl.tensor,
    in_size: tl.tensor,
    squares: tl.tensor,  # [INPUTS]
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return what the weights are multiplied with, float32, and the sums of squares with those of this part."""
    is_inside = inputs < in_size
    row = tl.load(x + inputs, mask=is_inside, other=0.0)
    values = row.to(tl.float32)
    if ACTIVATION is not None:
        if not ACTIVATION.is_gated:
            values = ungated(values, ACTIVATION)
        else:
            up = tl.load(x + in_size + inputs, mask=is_inside, other=0.0)
            values = gated(values, up.to(tl.float32), ACTIVATION)
        values = values.to(row.dtype).to(tl.float32)
    if residual is not None:  # rounded to the dtype, as later layers read it
        added = tl.load(residual + inputs, mask=is_inside, other=0.0)
        row = (values + added.to(tl.float32)).to(row.dtype)
        tl.store(total + inputs, row, mask=is_inside & (tl.program_id(0) == 0))
        values = row.to(tl.float32)
    if norm_weight is not None:
        squares += values * values
        values *= tl.load(norm_weight + inputs, mask=is_inside, other=0.0).to(tl.float32) + OFFSET
    return values, squares


@triton.jit
def _one_row_kernel(
    x: tl.tensor,  # [1, K]; [1, 2 * K] before a gated activation
    residual: tl.tensor | None,  # [1, K]
    norm_weight: tl.tensor | None,  # [K]; None: no norm
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor | None,  # [N]
    out: tl.tensor,  # [1, N]
    total: tl.tensor | None,  # [1, K]: x + residual
    num_outputs: tl.tensor,
    in_size: tl.tensor,  # K
    eps: tl.tensor,
    ACTIVATION: tl.constexpr,  # Activation, or None
    OFFSET: tl.constexpr,  # of the norm's weight
    IS_EVEN: tl.constexpr,  # K is a multiple of INPUTS
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    inputs, places = tl.arange(0, INPUTS), weight + here[:, None] * in_size
    weights = _part_of_weights(places, inputs, in_size, IS_EVEN)  # which no kernel writes: before the wait
    await_previous(OVERLAPS)
    squares = tl.zeros((INPUTS,), tl.float32)
    values, squares = _part_of_row(x, residual, norm_weight, total, inputs, in_size, squares, ACTIVATION, OFFSET)
    products = weights.to(tl.float32) * values[None, :]  # summed over inputs in the end: that takes a barrier
    for first in range(INPUTS, in_size, INPUTS):
        weights = _part_of_weights(places, first + inputs, in_size, IS_EVEN)
        values, squares = _part_of_row(
            x, residual, norm_weight, total, first + inputs, in_size, squares, ACTIVATION, OFFSET
        )
        products += weights.to(tl.float32) * values[None, :]
    sums = tl.sum(products, axis=1)
    if norm_weight is not None:
        sums *= tl.rsqrt(tl.sum(squares, axis=0) / in_size + eps)
    if bias is not None:
        sums += tl.load(bias + here).to(tl.float32)
    tl.store(out + outputs, sums.to(out.dtype.element_ty), mask=outputs < num_outputs)


def tiling_for(num_outputs: int, in_size: int) -> OneRowTiling:
    """Return a program's tile."""
    return _LONG if in_size >= _LONG.inputs and num_outputs <= _MOST_OUTPUTS_OF_LONG else _SHORT


def one_row_linear(
    x: Tensor,
    packed: PackedLinear,
    *,
    fused: Fused | None = None,
    activation: Activation | None = None,
    tiling: OneRowTiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply a dense linear to x [1, K]: (the result [1, N], the sum [1, K]), by a tiling of choice.

    With `fused`, to the norm of the sum of x and the residual; without a residual the sum is x itself. With
    `activation`, to the activation of x, [1, 2 * K] if it is gated.
    """
    num_outputs, in_size = packed.weight.shape
    tiling = tiling or tiling_for(num_outputs, in_size)
    num_programs = triton.cdiv(num_outputs, tiling.outputs)
    if activation is not None and num_programs * in_size > _MOST_ACTIVATIONS:
        x, activation = activate(x, activation), None
    x = aligned(x)
    out, total, residual, norm_weight, eps, offset = x.new_empty(1, num_outputs), None, None, None, 0.0, 0.0
    if fused is not None:
        norm_weight, eps, offset = fused.norm_weight, fused.eps, fused.norm_offset
        if fused.residual is not None:
            residual, total = aligned(fused.residual), torch.empty_like(x)
    _one_row_kernel[(num_programs,)](
        *(x, residual, norm_weight, packed.weight, packed.bias, out, total),
        *(num_outputs, in_size, eps),
        ACTIVATION=activation,
        OFFSET=offset,
        IS_EVEN=in_size % tiling.inputs == 0,
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        num_warps=tiling.num_warps,
        **overlap(),
    )
    return out, x if total is None else total
