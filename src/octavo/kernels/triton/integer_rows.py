"""Activations quantized to int8 for integer weights (`integer_rows` of `kernels/quantize.py`).

A preceding norm or gate is fused into the same launch: a whole row fits in registers.

Legend: T = rows, K = their size, P = K padded.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.quantization import ROTATION_BLOCK, Rotation, mixing_scale
from octavo.kernels.triton.row_ops import aligned, gated, ungated, warps_of_row
from octavo.kernels.types import SILU, Activation, Fused


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Quantized rows, ready for products."""

    values: Tensor  # [T, P] int8, padded with zeros
    scales: Tensor  # [T] float32
    total: Tensor  # [T, K] of what was quantized, x + residual; without a residual x itself


@triton.jit
def _sums_and_differences(x: tl.tensor, STEP: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:  # [BLOCK] float32
    pairs = tl.permute(tl.reshape(x, (BLOCK // (2 * STEP), 2, STEP)), (0, 2, 1))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (BLOCK,))


@triton.jit
def _rotated(
    x: tl.tensor,  # [BLOCK] float32
    size: tl.tensor,
    mixing_scale: tl.tensor,
    SPANS_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STEPS: tl.constexpr,  # 2^NUM_STEPS is no less than any power of two that divides a rotated size
) -> tl.tensor:
    """Rotate the first `size` elements, as `rotated` of kernels/quantization.py does, in its order."""
    columns = tl.arange(0, BLOCK)
    num_rotated = size // 64 * 64
    mixed = x
    for number in tl.static_range(6):
        mixed = _sums_and_differences(mixed, 1 << number, BLOCK)
    mixed = mixed * 0.125
    if SPANS_ROW:
        for number in tl.static_range(6, NUM_STEPS):
            mixed = tl.where(num_rotated % (2 << number) == 0, _sums_and_differences(mixed, 1 << number, BLOCK), mixed)
        step = num_rotated & -num_rotated
        while (num_rotated > 0) & (num_rotated % tl.maximum(3 * step, 1) == 0):
            first = tl.minimum(columns - columns // step % 3 * step, BLOCK - 1 - 2 * step)
            total = tl.gather(mixed, first, 0) + tl.gather(mixed, first + step, 0)
            total += tl.gather(mixed, first + 2 * step, 0)
            mixed = total + total - (mixed + mixed + mixed)
            step *= 3
        mixed = mixed * mixing_scale
    return tl.where(columns < num_rotated, mixed, x)


@triton.jit
def _integer_rows_kernel(
    x: tl.tensor,  # [T, K]; if IS_ACTIVATED, before the activation
    residual: tl.tensor | None,  # [T, K]
    norm_weight: tl.tensor | None,  # [K]
    total: tl.tensor | None,  # [T, K]
    values: tl.tensor,  # [T, P] int8
    scales: tl.tensor,  # [T] float32
    sizes: tl.tensor | None,  # [T] int32, how much of each row is there; None: K
    mixing_scales: tl.tensor | None,  # [T] float32, with sizes
    mixing_scale: tl.tensor,  # of K
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # Activation
    IS_ROTATED: tl.constexpr,
    SPANS_ROW: tl.constexpr,
    SIZE: tl.constexpr,  # K
    PADDED: tl.constexpr,  # P
    BLOCK: tl.constexpr,
    NUM_STEPS: tl.constexpr,  # 2^NUM_STEPS is no less than any power of two that divides a rotated size
) -> None:
    """One program per row. Results of ops fused here are rounded to the dtype in between."""
    number = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    places = number * SIZE + columns
    if IS_ACTIVATED and ACTIVATION.is_gated:
        gate = tl.load(x + number * SIZE + places, mask=is_inside, other=0.0)
        up = tl.load(x + number * SIZE + SIZE + places, mask=is_inside, other=0.0)
        row = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION).to(gate.dtype)
    else:
        row = tl.load(x + places, mask=is_inside, other=0.0)
        if IS_ACTIVATED:
            row = ungated(row.to(tl.float32), ACTIVATION).to(row.dtype)
    if residual is not None:
        row = (row.to(tl.float32) + tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + places, row, mask=is_inside)
    if norm_weight is not None:
        wide = row.to(tl.float32)
        factors = tl.load(norm_weight + columns, mask=is_inside, other=0.0).to(tl.float32)
        if OFFSET != 0.0:
            factors += OFFSET
        row = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * factors).to(row.dtype)
    wide = row.to(tl.float32)
    if IS_ROTATED:
        size = SIZE
        if sizes is not None:
            size, mixing_scale = tl.load(sizes + number), tl.load(mixing_scales + number)
        wide = _rotated(wide, size, mixing_scale, SPANS_ROW, BLOCK, NUM_STEPS)
    # Bit patterns of float magnitudes compare like the magnitudes, with NaN last.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = bits.to(tl.float32, bitcast=True)
    is_finite = bits < 0x7F800000
    is_computed = is_finite & (largest >= 7.52316384526264e-37)  # 2^-120
    inverse = tl.where(is_computed, tl.div_rn(127.0, tl.where(is_computed, largest, 1.0)), 0.0)
    unknown = tl.where(is_finite, 0.0, float("nan"))
    tl.store(scales + number, tl.where(is_computed, tl.div_rn(largest, 127.0), unknown))
    # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even: no bits are left for fractions.
    rounded = tl.where(is_computed, wide, 0.0) * inverse + 12582912.0 - 12582912.0
    tl.store(values + number * PADDED + columns, rounded.to(tl.int8), mask=columns < PADDED)


def integer_rows(
    x: Tensor,
    padded_size: int,
    rotation: Rotation | None,
    *,
    fused: Fused | None = None,
    activation: Activation | None = None,
    sizes: tuple[Tensor, Tensor] | None = None,
) -> IntegerRows:
    """Quantize x [T, K] to integers [T, P], rotated first as the weight is.

    With `fused`, the norm of x + residual is quantized; with an activation, that of x, [T, 2 * K] if it is gated, gates
    first. With `sizes` rows are shorter than K, padded with zeros: [T] int32, and `mixing_scale` of each, [T] float32.
    """
    x, num_rows = aligned(x), len(x)
    size = x.shape[1] // (2 if activation is not None and activation.is_gated else 1)
    values = torch.empty(num_rows, padded_size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    residual, norm_weight, eps, offset, total = None, None, 0.0, 0.0, None
    if fused is not None:
        residual, norm_weight, eps, offset = fused.residual, fused.norm_weight, fused.eps, fused.norm_offset
    if residual is not None:
        residual, total = aligned(residual), torch.empty_like(x)
    if num_rows:
        block, num_rotated = triton.next_power_of_2(padded_size), size // ROTATION_BLOCK * ROTATION_BLOCK
        _integer_rows_kernel[(num_rows,)](
            *(x, residual, norm_weight, total, values, scales),
            *((None, None) if sizes is None else sizes),
            *(mixing_scale(size), eps),
            OFFSET=offset,
            IS_ACTIVATED=activation is not None,
            ACTIVATION=activation or SILU,
            IS_ROTATED=rotation is not None,
            SPANS_ROW=rotation == "row",
            SIZE=size,
            PADDED=padded_size,
            BLOCK=block,
            NUM_STEPS=(block if sizes else num_rotated & -num_rotated).bit_length() - 1,
            num_warps=warps_of_row(block),
            enable_fp_fusion=False,  # a fused multiply-add would not round in between
        )
    return IntegerRows(values, scales, x if total is None else total)
