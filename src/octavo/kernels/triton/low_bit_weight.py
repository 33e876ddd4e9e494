"""Low-bit weights: their layout, and how a split of a product decodes them in registers.

Blocks of 64 inputs are contiguous over all outputs: a program's load, some outputs by one block, is then one piece of
memory. Two 4-bit inputs, 32 apart, share a byte: a product takes 32 inputs, so each nibble of the bytes is one operand,
and nothing has to be shuffled.

Weights are the left operand: Hopper's tensor cores take that side from registers, and few rows, on the other side,
leave little of the unit idle. Factors are exact in every dtype; scales are applied to sums. Integers are summed
exactly.

Legend: T = rows, N = outputs, K = inputs, P = K padded to a multiple of 128, B = P / 64, G = groups of inputs,
including padding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.quantization import Float8Format, PlainFormat, QuantizedWeight
from octavo.kernels.types import PackedLinear

STEP = 128  # inputs per iteration: the largest group
_BLOCK, _HALF = 64, 32
# A float with 4 exponent bits, read as float16 with 5, is too small by this factor: the difference of the biases.
_E4M3_IN_FLOAT16 = 2.0**8


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitLinear(PackedLinear):
    """A low-bit linear. `weight` is [B, N, 64] int8, or [B, N, 32] with inputs k and k + 32 of a block in a byte."""

    form: PlainFormat
    in_size: int  # K
    scales: Tensor  # [G, N] float32
    offsets: Tensor | None  # [G, N] float32
    multipliers: Tensor | None  # [P / 32, N] int8, of two-level integers

    @property
    def padded_size(self) -> int:
        """Return P."""
        return len(self.weight) * _BLOCK


def pack_low_bit(weight: QuantizedWeight, bias: Tensor | None) -> LowBitLinear:
    """Convert a weight and bias [N] to this layout."""
    form, (num_outputs, in_size) = weight.format, weight.values.shape
    is_float = isinstance(form, Float8Format)
    padding = -in_size % STEP
    values = F.pad(weight.values.view(torch.int8), (0, padding))  # [N, P]
    blocks = values.view(num_outputs, -1, _BLOCK).transpose(0, 1)  # [B, N, 64]
    if form.bits == 4:
        low, high = (half + 8 for half in torch.split(blocks, _HALF, dim=-1))  # [B, N, 32]: -8 ... 7 become 0 ... 15
        blocks = low | high << 4
    num_blocks, multipliers = len(blocks), weight.multipliers
    num_groups = num_blocks * _BLOCK // form.group_size if form.group_size else 1
    return LowBitLinear(
        weight=blocks.contiguous(),
        bias=bias,
        num_outputs=num_outputs,
        form=form,
        in_size=in_size,
        scales=_by_groups(weight.scales * (_E4M3_IN_FLOAT16 if is_float else 1.0), num_groups),
        offsets=None if weight.offsets is None else _by_groups(weight.offsets, num_groups),
        multipliers=None if multipliers is None else _by_groups(multipliers, num_blocks * 2),
    )


def _by_groups(of_outputs: Tensor, num_groups: int) -> Tensor:
    """Return [N, G] as [G, N], padded with zeros."""
    return F.pad(of_outputs, (0, num_groups - of_outputs.shape[1])).T.contiguous()


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernels are compiled for."""

    is_halved: bool  # 4 bits
    is_float: bool
    is_two_level: bool
    group_size: int  # larger than a step: all inputs share a scale
    has_offsets: bool
    scales_inside: bool  # scales are applied within the sum of a split, which is then float


def form_of(packed: LowBitLinear) -> Form:
    """Return the compile-time form of a packed linear."""
    form = packed.form
    return Form(
        is_halved=form.bits == 4,
        is_float=isinstance(form, Float8Format),
        is_two_level=form.is_two_level,
        group_size=form.group_size or 2 * STEP,
        has_offsets=packed.offsets is not None,
        scales_inside=form.group_size is not None or packed.offsets is not None,
    )


@triton.jit
def _factors(
    weight: tl.tensor,  # [B, N, 64 or 32] int8
    multipliers: tl.tensor,  # [P / 32, N] int8
    outputs: tl.tensor,
    num_outputs: tl.tensor,
    block: tl.tensor,  # int64
    HALF: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Return [outputs, 32]: the numbers of one half of a block, in a type that represents them exactly."""
    lanes = tl.arange(0, 32)[None, :]
    if FORM.is_halved:
        raw = ((tl.load(weight + (block * num_outputs + outputs)[:, None] * 32 + lanes) >> (4 * HALF)) & 15) - 8
    else:
        raw = tl.load(weight + (block * num_outputs + outputs)[:, None] * 64 + 32 * HALF + lanes)
    if FORM.is_float:
        # Sign, then exponent and mantissa at float16's positions.
        wide = raw.to(tl.int16)
        found = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif FORM.is_two_level:
        of_output = tl.load(multipliers + (block * 2 + HALF) * num_outputs + outputs).to(tl.int32)
        found = ((raw.to(tl.int32) * of_output[:, None] + 4) >> 3).to(tl.int8)
    else:
        found = raw
    return found


@triton.jit
def _scaled(
    result: tl.tensor, of_row: tl.tensor, scales: tl.tensor, offsets: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Apply scales and offsets to a sum of products [OUTPUTS, ROWS] and of inputs [ROWS]; addresses are per output."""
    found = tl.load(scales)[:, None] * result.to(tl.float32)
    if FORM.has_offsets:
        found += tl.load(offsets)[:, None] * of_row.to(tl.float32)[None, :]
    return found


@triton.jit
def split_sum(
    x_rows: tl.tensor,  # [ROWS] addresses of rows
    is_row: tl.tensor,  # [ROWS]; missing rows count as zeros
    weight: tl.tensor,  # [B, N, 64 or 32] int8
    scales: tl.tensor,  # [G, N]
    offsets: tl.tensor,  # [G, N]
    multipliers: tl.tensor,  # [P / 32, N] int8
    outputs: tl.tensor,  # none beyond N
    num_outputs: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    FORM: tl.constexpr,  # Form
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> tl.tensor:
    """Return weight @ x.T over inputs begin ... end - 1, [OUTPUTS, ROWS]: scaled if FORM.scales_inside."""
    IS_EXACT: tl.constexpr = x_rows.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if IS_EXACT else tl.float32
    x_places = x_rows[:, None] + tl.arange(0, 32)[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    result, of_rows = tl.zeros((OUTPUTS, ROWS), SUM), tl.zeros((ROWS, 32), SUM)
    for first in range(begin, end, 128):
        for part in tl.static_range(4):
            block = first // 64 + part // 2 + tl.zeros((1,), tl.int64)
            left = _factors(weight, multipliers, outputs, num_outputs, block, part % 2, FORM)
            right = tl.load(x_places + first + part * 32, mask=is_row[:, None], other=0)
            if not IS_EXACT:
                left = left.to(tl.float32).to(right.dtype)
            result = tl.dot(left, tl.trans(right), result, input_precision="tf32x3", out_dtype=SUM)
            if FORM.has_offsets:
                of_rows += right.to(SUM)
            if (part + 1) * 32 % FORM.group_size == 0:
                group = (first + part * 32) // FORM.group_size + tl.zeros((1,), tl.int64)
                of_group = group * num_outputs + outputs
                total += _scaled(result, tl.sum(of_rows, axis=1), scales + of_group, offsets + of_group, FORM)
                result, of_rows = tl.zeros((OUTPUTS, ROWS), SUM), tl.zeros((ROWS, 32), SUM)
    if FORM.group_size <= 128:
        found = total
    elif FORM.has_offsets:
        found = _scaled(result, tl.sum(of_rows, axis=1), scales + outputs, offsets + outputs, FORM)
    else:
        found = result
    return found


@triton.jit
def finished(
    total: tl.tensor,
    scales: tl.tensor,  # of outputs, where they are not in the total
    row_scales: tl.tensor,
    bias: tl.tensor,
    IS_SCALED: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Apply the scales and bias of outputs and rows to a total; addresses match its shape."""
    total = total.to(tl.float32)
    if not IS_SCALED:
        total *= tl.load(scales)
    if HAS_ROW_SCALES:
        total *= tl.load(row_scales)
    if HAS_BIAS:
        total += tl.load(bias).to(tl.float32)
    return total
