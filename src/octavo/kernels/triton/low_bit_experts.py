"""The linears of many experts with low-bit weights, in one launch each, for any number of rows per expert.

Rows are sorted by expert, and weights read by address, as in `experts.py`; a program's product is `low_bit_sum.py`'s
over all inputs, so a row's integers have the same bits in any batch, equal to those of an expert computed alone.
Between the linears, a row is activated, and with integer weights quantized, as a whole.

Legend: T = tokens, X = experts (a shared one is the last), D = hidden size, P = D padded, I = intermediate size of an
expert, Q = the largest I, padded, R = pairs of a token and an expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.quantization import Float8Format
from octavo.kernels.rotation import Rotation, mixing_scale
from octavo.kernels.triton.activation import activate
from octavo.kernels.triton.grouped_rows import max_blocks, rows_of_block, sort_by_group
from octavo.kernels.triton.integer_rows import RowSizes, activated_integer_rows, integer_rows
from octavo.kernels.triton.low_bit_matmul import padded_rows, tiling_for
from octavo.kernels.triton.low_bit_sum import Form, finished, form_of, split_sum
from octavo.kernels.triton.low_bit_weight import LowBitLinear
from octavo.kernels.types import Activation, PackedExperts, PackedLinear

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitExperts(PackedExperts):
    """Experts with the tables that the kernel reads. The tuples keep the addressed memory alive."""

    gate_up_addresses: Tensor  # [4, X] int64, of weights [2 * I, D], gates first: see `_addresses`
    down_addresses: Tensor  # [4, X] int64, of weights [D, I]
    sizes: Tensor  # [X] int32, each expert's I
    mixing_scales: Tensor  # [X] float32, `mixing_scale` of each
    form: Form
    is_integer: bool
    rotation: Rotation | None
    hidden_size: int  # D
    padded_size: int  # P
    largest_size: int
    row_size: int  # Q
    num_parts: int  # parts of the first linear's output: 2 if gated, else 1
    are_sizes_alike: bool  # each I is Q
    size_divisor: int  # divides each I


def pack_experts(gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> LowBitExperts:
    """Combine experts in place: gate_up of [2 * I, D], down of [D, I], all of one form."""
    into, back = _low_bit_linears(gate_up), _low_bit_linears(down)
    sizes, device = [linear.in_size for linear in back], back[0].weight.device
    [num_parts] = {linear.num_outputs // size for linear, size in zip(into, sizes, strict=True)}
    [form] = {linear.form for linear in (*into, *back)}
    [kernel_form] = {form_of(linear) for linear in (*into, *back)}
    row_size = max(linear.padded_size for linear in back)
    return LowBitExperts(
        gate_up=into,
        down=back,
        gate_up_addresses=_addresses(into),
        down_addresses=_addresses(back),
        sizes=torch.tensor(sizes, dtype=torch.int32, device=device),
        mixing_scales=torch.tensor([mixing_scale(size) for size in sizes], device=device),
        form=kernel_form,
        is_integer=not isinstance(form, Float8Format),
        rotation=into[0].rotation,
        hidden_size=back[0].num_outputs,
        padded_size=into[0].padded_size,
        largest_size=max(sizes),
        row_size=row_size,
        num_parts=num_parts,
        are_sizes_alike=set(sizes) == {row_size},
        size_divisor=math.gcd(_ALIGNMENT, *sizes),
    )


def _low_bit_linears(linears: Sequence[PackedLinear]) -> tuple[LowBitLinear, ...]:
    found = tuple(linear for linear in linears if isinstance(linear, LowBitLinear))
    assert len(found) == len(linears), "experts need low-bit weights"
    assert all(linear.bias is None for linear in found), "experts have no biases"
    return found


def _addresses(linears: Sequence[LowBitLinear]) -> Tensor:
    """Return [4, X] int64: of weights, scales, offsets and multipliers; absent ones point to the scales."""
    parts = [
        [linear.weight for linear in linears],
        [linear.scales for linear in linears],
        [linear.scales if linear.offsets is None else linear.offsets for linear in linears],
        [linear.scales if linear.multipliers is None else linear.multipliers for linear in linears],
    ]
    assert all(part.is_contiguous() and part.data_ptr() % _ALIGNMENT == 0 for of_maps in parts for part in of_maps)
    return torch.tensor([[part.data_ptr() for part in of_maps] for of_maps in parts], device=linears[0].weight.device)


@triton.jit
def _low_bit_experts_kernel(
    x: tl.tensor,  # IS_INTO: [T, P]; else [R, Q], sorted by expert
    row_scales: tl.tensor,  # [T] or [R] float32, of x
    token_ids: tl.tensor,  # [R] int64, of pairs
    order: tl.tensor,  # [R] int64, pairs sorted by expert
    bounds: tl.tensor,  # [X + 1] int64: the pairs of expert e are order[bounds[e] ... bounds[e + 1] - 1]
    addresses: tl.tensor,  # [4, X] int64
    sizes: tl.tensor,  # [X] int32
    out: tl.tensor,  # IS_INTO: [R, PARTS * Q], sorted by expert, ups from Q on; else [R, D], in pair order
    x_size: tl.tensor,  # P or Q
    hidden_size: tl.tensor,  # D
    row_size: tl.tensor,  # Q
    FORM: tl.constexpr,  # Form
    X: tl.constexpr,
    IS_INTO: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    DIVISOR: tl.constexpr,
    X_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """A program computes one tile of one expert's output, or nothing: the grid is an upper bound."""
    expert, rows, is_row = rows_of_block(tl.program_id(0), bounds, X, X_BLOCK, ROWS)
    if expert >= X:
        return
    size = tl.multiple_of(tl.load(sizes + expert), DIVISOR)
    num_outputs = PARTS * size if IS_INTO else hidden_size
    if tl.program_id(1) * OUTPUTS >= num_outputs:
        return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = tl.minimum(outputs, num_outputs - 1)
    pairs = tl.load(order + rows, mask=is_row, other=0)
    of_experts = tl.where(is_row, rows, 0).to(tl.int64)
    if IS_INTO:
        sources = tl.load(token_ids + pairs, mask=is_row, other=0)
        targets, columns = of_experts * PARTS * row_size, outputs + tl.where(outputs < size, 0, row_size - size)
        in_size = x_size
    else:
        sources = of_experts
        targets, columns = pairs * hidden_size, outputs
        in_size = (size + 127) // 128 * 128
    parts = addresses + expert
    weight = tl.multiple_of(tl.load(parts).to(tl.pointer_type(tl.int8)), 16)
    scales = tl.multiple_of(tl.load(parts + X).to(tl.pointer_type(tl.float32)), 16)
    offsets = tl.multiple_of(tl.load(parts + 2 * X).to(tl.pointer_type(tl.float32)), 16)
    multipliers = tl.multiple_of(tl.load(parts + 3 * X).to(tl.pointer_type(tl.int8)), 16)
    total = split_sum(
        *(x + sources * x_size, is_row, weight, scales, offsets, multipliers, here, num_outputs),
        *(0, in_size, FORM, ROWS, OUTPUTS),
    )
    total = finished(
        *(total, scales + here[:, None], row_scales + sources[None, :], scales),
        *(FORM.scales_inside, HAS_ROW_SCALES, False),
    )
    is_inside = (outputs < num_outputs)[:, None] & is_row[None, :]
    tl.store(out + targets[None, :] + columns[:, None], total.to(out.dtype.element_ty), mask=is_inside)


def expert_rows(
    x: Tensor,  # [T, D]
    token_ids: Tensor,  # [R] int64
    expert_ids: Tensor,  # [R] int64
    experts: LowBitExperts,
    activation: Activation,
    *,
    one_tiling: bool,
) -> Tensor:  # [R, D]
    """Return in row r the output of expert expert_ids[r] on token token_ids[r]. Does not sync with the device.

    With `one_tiling`, float weights, too, use the same tiling for any number of rows.
    """
    num_pairs, row_size = len(expert_ids), experts.row_size
    pairs = token_ids, *sort_by_group(expert_ids, len(experts.down))
    # Experts smaller than Q leave zeros: these do not change a row's integers, and are multiplied by zero weights.
    make = x.new_empty if experts.are_sizes_alike else x.new_zeros
    middle, out = make(num_pairs, experts.num_parts * row_size), x.new_empty(num_pairs, experts.hidden_size)
    rows, row_scales = _operand(x, experts)
    _launch(rows, row_scales, pairs, experts, middle, is_into=True, one_tiling=one_tiling)
    of_rows = expert_ids[pairs[1]]  # in the order of experts
    sizes = None if experts.are_sizes_alike else RowSizes(experts.sizes[of_rows], experts.mixing_scales[of_rows])
    rows, row_scales = _activated_operand(middle, sizes, experts, activation)
    _launch(rows, row_scales, pairs, experts, out, is_into=False, one_tiling=one_tiling)
    return out


def _operand(x: Tensor, experts: LowBitExperts) -> tuple[Tensor, Tensor | None]:
    """Return x [T, D] in the linears' format, [T, P], and for integer weights its scales [T]."""
    if not experts.is_integer:
        return padded_rows(x, experts.padded_size), None
    rows = integer_rows(x, experts.padded_size, rotation=experts.rotation)
    return rows.values, rows.scales


def _activated_operand(
    middle: Tensor, sizes: RowSizes | None, experts: LowBitExperts, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """The same for the activation, [R, Q] of middle [R, 2 * Q], or [R, Q] if not gated; `sizes` if not all are Q."""
    if not experts.is_integer:
        return activate(middle, activation), None
    rows = activated_integer_rows(middle, activation, experts.row_size, rotation=experts.rotation, sizes=sizes)
    return rows.values, rows.scales


def _launch(
    x: Tensor,
    row_scales: Tensor | None,
    pairs: tuple[Tensor, Tensor, Tensor],  # token_ids, order, bounds
    experts: LowBitExperts,
    out: Tensor,
    *,
    is_into: bool,
    one_tiling: bool,
) -> None:
    num_pairs, num_experts = len(pairs[0]), len(experts.down)
    # As many rows as an expert has on average: an expert with more takes several blocks.
    tiling = tiling_for(triton.cdiv(num_pairs, num_experts), x.dtype, one_tiling=one_tiling)
    max_outputs = experts.num_parts * experts.largest_size if is_into else experts.hidden_size
    addresses = experts.gate_up_addresses if is_into else experts.down_addresses
    grid = max_blocks(num_pairs, num_experts, tiling.rows), triton.cdiv(max_outputs, tiling.outputs)
    _low_bit_experts_kernel[grid](
        x,
        addresses if row_scales is None else row_scales,  # placeholder address, never read
        *pairs,
        addresses,
        experts.sizes,
        out,
        x.shape[1],
        experts.hidden_size,
        experts.row_size,
        FORM=experts.form,
        X=num_experts,
        IS_INTO=is_into,
        PARTS=experts.num_parts,
        HAS_ROW_SCALES=row_scales is not None,
        DIVISOR=experts.size_divisor,
        X_BLOCK=triton.next_power_of_2(num_experts),
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )
