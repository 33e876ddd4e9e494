"""Linear layers with low-bit weights: tilings, launches, epilogue.

The input is split at fixed places that depend on the weight's shape alone. A split is summed tile by tile, and splits
are added in order. With few rows, each split has a program of its own, and a second launch adds them up; with many, one
program does all. Both are the same operations on the same numbers.

Legend: T = rows, K = inputs, N = outputs, P = K padded, B = P / 64, G = groups, S = splits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.quantization import IntegerFormat
from octavo.kernels.triton.integer_rows import IntegerRows, integer_rows
from octavo.kernels.triton.low_bit_weight import STEP, LowBitLinear, finished, form_of, split_sum
from octavo.kernels.triton.row_ops import aligned

_PROGRAMS = 256  # about two per multiprocessor: with fewer, some idle
_JOINED = tl.constexpr(1024)  # elements per program that adds up splits


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """A program's tile: rows by outputs."""

    rows: int
    outputs: int
    num_warps: int = 4


FEW, SOME, MANY = MatmulTiling(16, 64), MatmulTiling(64, 128), MatmulTiling(128, 128, num_warps=8)
_FLOAT32 = MatmulTiling(32, 64)  # three products of TF32 take more registers
_MAX_FEW = FEW.rows
_MAX_SOME = 256  # rows: up to here they cost less than reading the weights


@triton.jit
def _join_kernel(
    parts: tl.tensor,  # [S, T, N]
    scales: tl.tensor,  # [N] float32, unless the parts are scaled already
    row_scales: tl.tensor,  # [T] float32
    bias: tl.tensor,  # [N]
    out: tl.tensor,  # [T, N]
    size: tl.tensor,  # T * N
    num_outputs: tl.tensor,
    num_splits: tl.tensor,  # S
    IS_SCALED: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    places = tl.program_id(0) + tl.zeros((1,), tl.int64)
    places = places * _JOINED + tl.arange(0, _JOINED)
    is_inside = places < size
    here = tl.minimum(places, size - 1)
    total = tl.zeros((_JOINED,), parts.dtype.element_ty)
    for _split in range(num_splits):
        total += tl.load(parts + here)
        parts += size
    outputs, rows = here % num_outputs, here // num_outputs
    total = finished(total, scales + outputs, row_scales + rows, bias + outputs, IS_SCALED, HAS_ROW_SCALES, HAS_BIAS)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _low_bit_kernel(
    x: tl.tensor,  # [T, P]
    row_scales: tl.tensor,  # [T] float32
    weight: tl.tensor,  # [B, N, 64 or 32] int8
    scales: tl.tensor,  # [G, N] float32
    offsets: tl.tensor,  # [G, N] float32
    multipliers: tl.tensor,  # [P / 32, N] int8
    bias: tl.tensor,  # [N]
    out: tl.tensor,  # [T, N]; with SPLIT_APART [S, T, N], of the dtype of sums
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    in_size: tl.tensor,  # P
    split: tl.tensor,  # inputs
    FORM: tl.constexpr,  # Form
    SPLIT_APART: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, x_rows = rows < num_rows, x + rows.to(tl.int64) * in_size
    is_inside = (outputs < num_outputs)[:, None] & is_row[None, :]
    places = rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    here, of_row = tl.minimum(outputs, num_outputs - 1), tl.minimum(rows, num_rows - 1)
    if SPLIT_APART:
        begin = tl.program_id(2) * split
        total = split_sum(
            *(x_rows, is_row, weight, scales, offsets, multipliers, here, num_outputs),
            *(begin, tl.minimum(begin + split, in_size), FORM, ROWS, OUTPUTS),
        )
        part = tl.program_id(2) + tl.zeros((1, 1), tl.int64)
        tl.store(out + part * num_rows * num_outputs + places, total, mask=is_inside)
    else:
        SUM: tl.constexpr = tl.int32 if HAS_ROW_SCALES and not FORM.scales_inside else tl.float32
        total = tl.zeros((OUTPUTS, ROWS), SUM)
        for begin in range(0, in_size, split):
            total += split_sum(
                *(x_rows, is_row, weight, scales, offsets, multipliers, here, num_outputs),
                *(begin, tl.minimum(begin + split, in_size), FORM, ROWS, OUTPUTS),
            )
        total = finished(
            *(total, scales + here[:, None], row_scales + of_row[None, :], bias + here[:, None]),
            *(FORM.scales_inside, HAS_ROW_SCALES, HAS_BIAS),
        )
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)


def low_bit_linear(x: Tensor, packed: LowBitLinear, dtype: torch.dtype, *, one_tiling: bool) -> Tensor:
    """Apply a linear to x [T, K], for integer weights quantized per row: [T, N] of a dtype.

    With `one_tiling`, that of floats is the same for any number of rows.
    """
    if isinstance(packed.form, IntegerFormat):
        return integer_product(integer_rows(x, packed.padded_size, packed.form.rotation), packed, dtype)
    return weight_only_linear(x, packed, dtype, one_tiling=one_tiling)


def integer_product(rows: IntegerRows, packed: LowBitLinear, dtype: torch.dtype) -> Tensor:
    """Apply an integer linear to quantized rows [T, P]: [T, N] of a dtype."""
    return _launch(rows.values, rows.scales, packed, dtype, one_tiling=False)


def weight_only_linear(x: Tensor, packed: LowBitLinear, dtype: torch.dtype, *, one_tiling: bool) -> Tensor:
    """Apply a linear to unquantized x [T, K], whatever the weight's form."""
    assert packed.form.rotation is None, "rotated weights need rotated rows"
    return _launch(padded_rows(x, packed.padded_size), None, packed, dtype, one_tiling=one_tiling)


def padded_rows(x: Tensor, padded_size: int) -> Tensor:
    """Return x [T, K] padded with zeros to [T, P], aligned for the kernel."""
    return aligned(x if x.shape[1] == padded_size else F.pad(x, (0, padded_size - x.shape[1])))


def tiling_for(num_rows: int, dtype: torch.dtype, *, one_tiling: bool) -> MatmulTiling:
    """Return the tiling for a number of rows; with `one_tiling` the same for any number."""
    if num_rows <= _MAX_FEW and not one_tiling:
        return FEW
    if dtype == torch.float32:
        return _FLOAT32
    return SOME if num_rows <= _MAX_SOME or one_tiling else MANY


def _launch(
    x: Tensor,  # [T, P]
    row_scales: Tensor | None,  # [T]
    packed: LowBitLinear,
    dtype: torch.dtype,
    *,
    one_tiling: bool,
) -> Tensor:
    (num_rows, in_size), num_outputs, form = x.shape, packed.num_outputs, form_of(packed)
    tiling = tiling_for(num_rows, x.dtype, one_tiling=one_tiling)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    split = split_size(num_outputs, in_size)
    num_splits = triton.cdiv(in_size, split)
    tiles = triton.cdiv(num_outputs, tiling.outputs), triton.cdiv(num_rows, tiling.rows)
    is_apart = num_splits > 1 and tiles[0] * tiles[1] < _PROGRAMS
    is_exact = row_scales is not None and not form.scales_inside
    sums = torch.int32 if is_exact else torch.float32
    parts = torch.empty(num_splits, num_rows, num_outputs, dtype=sums, device=x.device) if is_apart else out
    has = {"HAS_ROW_SCALES": row_scales is not None, "HAS_BIAS": packed.bias is not None}
    optional = row_scales, packed.offsets, packed.multipliers, packed.bias
    # What is absent is never read; it gets the address of the scales.
    of_rows, offsets, multipliers, bias = (packed.scales if given is None else given for given in optional)
    _low_bit_kernel[(*tiles, num_splits if is_apart else 1)](
        *(x, of_rows, packed.weight, packed.scales, offsets, multipliers, bias, parts),
        *(num_rows, num_outputs, in_size, split),
        FORM=form,
        SPLIT_APART=is_apart,
        **has,
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )
    if is_apart:
        _join(parts, packed.scales, of_rows, bias, out, IS_SCALED=form.scales_inside, **has)
    return out


def _join(parts: Tensor, scales: Tensor, row_scales: Tensor, bias: Tensor, out: Tensor, **flags: bool) -> None:
    num_splits, _, num_outputs = parts.shape
    _join_kernel[(triton.cdiv(out.numel(), _JOINED.value),)](
        *(parts, scales, row_scales, bias, out, out.numel(), num_outputs, num_splits), **flags, enable_fp_fusion=False
    )


def split_size(num_outputs: int, in_size: int) -> int:
    """Return the inputs per split, such that one tile of few rows yields enough programs."""
    num_splits = max(1, _PROGRAMS // -(-num_outputs // FEW.outputs))
    return -(-in_size // (num_splits * STEP)) * STEP
