"""Activations as integers of 8 bits: what meets integer weights (`integer_rows` of `kernels/reference_quantized.py`).

What comes before, a norm or a gate, is computed in the same launch: a row is in registers as a whole.

Legend: T = rows, K = their size, P = K padded.
"""

from dataclasses import dataclass

import torch
import triton
from triton import language as tl

from octavo.kernels.quantization import ROTATION_BLOCK, rotation_scale
from octavo.kernels.triton.activation import constants, gated, squared
from octavo.kernels.triton.arguments import aligned
from octavo.kernels.types import SILU, Activation, Fused


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows ready for products."""

    values: torch.Tensor  # [T, P] int8, zeros behind their end
    scales: torch.Tensor  # [T] float32


@triton.jit
def _rotated(
    x: tl.tensor, size: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr, NUM_STEPS: tl.constexpr
) -> tl.tensor:
    """Rotate the first `size` of x [BLOCK] float32, whole blocks of 64: `rotated` of kernels/quantization.py."""
    columns = tl.arange(0, BLOCK)
    mixed = x
    for number in tl.static_range(NUM_STEPS):
        STEP: tl.constexpr = 1 << number
        pairs = tl.permute(tl.reshape(mixed, (BLOCK // (2 * STEP), 2, STEP)), (0, 2, 1))
        first, second = tl.split(pairs)
        joined = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (BLOCK,))
        mixed = tl.where(size // STEP % 2 == 0, joined, mixed)
    step = size & -size
    while (size > 0) & (size // tl.maximum(step, 1) % 3 == 0):
        number_of = columns // step % 3
        start = tl.minimum(columns - number_of * step, BLOCK - 1 - 2 * step)
        total = tl.gather(mixed, start, 0) + tl.gather(mixed, start + step, 0) + tl.gather(mixed, start + 2 * step, 0)
        mixed = total + total - (mixed + mixed + mixed)
        step *= 3
    return tl.where(columns < size, mixed * scale, x)


@triton.jit
def _put_integers(
    wide: tl.tensor,  # [BLOCK] float32, zeros behind its end
    values: tl.tensor,  # [P] int8
    scale: tl.tensor,
    PADDED: tl.constexpr,  # P
    BLOCK: tl.constexpr,
) -> None:
    # As integers, magnitudes of floats are in their order, and NaN is the last.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = bits.to(tl.float32, bitcast=True)
    is_finite = bits < 0x7F800000
    is_computed = is_finite & (largest >= 7.52316384526264e-37)  # 2^-120
    inverse = tl.where(is_computed, tl.div_rn(127.0, tl.where(is_computed, largest, 1.0)), 0.0)
    unknown = tl.where(is_finite, 0.0, float("nan"))
    tl.store(scale, tl.where(is_computed, tl.div_rn(largest, 127.0), unknown))
    # 1.5 * 2^23 leaves no room for fractions: the sum is rounded to the nearest integer, ties to even.
    rounded = tl.where(is_computed, wide, 0.0) * inverse + 12582912.0 - 12582912.0
    places = tl.arange(0, BLOCK)
    tl.store(values + places, rounded.to(tl.int8), mask=places < PADDED)


@triton.jit
def _integer_rows_kernel(
    x: tl.tensor,  # [T, K]; if IS_ACTIVATED as before the activation
    residual: tl.tensor | None,  # [T, K]
    norm_weight: tl.tensor | None,  # [K]
    total: tl.tensor | None,  # [T, K]
    values: tl.tensor,  # [T, P] int8
    scales: tl.tensor,  # [T] float32
    sizes: tl.tensor | None,  # [T] int32, how much of each row is there; None: K
    rotation_scales: tl.tensor | None,  # [T] float32, with them
    rotated_size: tl.tensor,  # where sizes are None
    rotation_scale: tl.tensor,
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    SIZE: tl.constexpr,  # K
    PADDED: tl.constexpr,  # P
    BLOCK: tl.constexpr,
    NUM_STEPS: tl.constexpr,  # 2^NUM_STEPS is BLOCK
) -> None:
    """One program a row. What would be an op of its own is rounded to the dtype."""
    number = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    places = number * SIZE + columns
    if IS_ACTIVATED and KIND != "relu2":
        gate = tl.load(x + number * SIZE + places, mask=is_inside, other=0.0)
        up = tl.load(x + number * SIZE + SIZE + places, mask=is_inside, other=0.0)
        row = gated(gate.to(tl.float32), up.to(tl.float32), KIND, LIMIT, ALPHA).to(gate.dtype)
    else:
        row = tl.load(x + places, mask=is_inside, other=0.0)
        if IS_ACTIVATED:
            row = squared(row.to(tl.float32)).to(row.dtype)
    if residual is not None:
        row = (row.to(tl.float32) + tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + places, row, mask=is_inside)
    if norm_weight is not None:
        wide = row.to(tl.float32)
        factors = tl.load(norm_weight + columns, mask=is_inside, other=0.0).to(tl.float32)
        if OFFSET != 0.0:
            factors += OFFSET
        row = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * factors).to(row.dtype)
    floats = row.to(tl.float32)
    if IS_ROTATED:
        if sizes is not None:
            rotated_size, rotation_scale = tl.load(sizes + number) // 64 * 64, tl.load(rotation_scales + number)
        floats = _rotated(floats, rotated_size, rotation_scale, BLOCK, NUM_STEPS)
    _put_integers(floats, values + number * PADDED, scales + number, PADDED, BLOCK)


def integer_rows(x: torch.Tensor, padded_size: int, *, is_rotated: bool) -> IntegerRows:
    """Bring x [T, K] to integers [T, P]; rotated first, for a weight that is."""
    return _launch(x, x.shape[1], padded_size, is_rotated)[0]


def activated_integer_rows(
    x: torch.Tensor,
    activation: Activation,
    padded_size: int,
    *,
    is_rotated: bool,
    sizes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> IntegerRows:
    """The same of the activation [T, K] of x: [T, 2 * K] with a gate, gates first, else [T, K].

    `sizes` [T] int32: rows are shorter than K, with zeros behind them; and [T] float32, `rotation_scale` of each.
    """
    size = x.shape[1] // (1 + activation.is_gated)
    return _launch(x, size, padded_size, is_rotated, activation=activation, sizes=sizes)[0]


def normed_integer_rows(
    x: torch.Tensor, fused: Fused, padded_size: int, *, is_rotated: bool
) -> tuple[IntegerRows, torch.Tensor]:
    """Return (the same of the norm of x + residual, x + residual [T, K]); without a residual the sum is x itself."""
    rows, total = _launch(x, x.shape[1], padded_size, is_rotated, fused)
    return rows, x if total is None else total


def _launch(
    x: torch.Tensor,
    size: int,
    padded_size: int,
    is_rotated: bool,
    fused: Fused | None = None,
    activation: Activation | None = None,
    sizes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[IntegerRows, torch.Tensor | None]:
    x, num_rows, total = aligned(x), len(x), None
    values = torch.empty(num_rows, padded_size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    residual = None if fused is None else fused.residual
    if residual is not None:
        residual, total = aligned(residual), torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(padded_size)
        row_sizes, scales_of = sizes or (None, None)
        rotated_size = size // ROTATION_BLOCK * ROTATION_BLOCK
        norm_weight, eps, offset = (fused.norm_weight, fused.eps, fused.norm_offset) if fused else (None, 0.0, 0.0)
        _integer_rows_kernel[(num_rows,)](
            *(x, residual, norm_weight, total, values, scales, row_sizes, scales_of),
            *(rotated_size, rotation_scale(rotated_size) if rotated_size else 1.0, eps),
            OFFSET=offset,
            IS_ACTIVATED=activation is not None,
            **constants(activation or SILU),
            IS_ROTATED=is_rotated,
            SIZE=size,
            PADDED=padded_size,
            BLOCK=block,
            NUM_STEPS=block.bit_length() - 1,
            num_warps=min(32, max(1, block // 512)),
            enable_fp_fusion=False,  # a product and a sum in one would not round in between
        )
    return IntegerRows(values, scales), total
