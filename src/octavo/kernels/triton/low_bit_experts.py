"""The linears of many experts with low-bit weights, in one launch each, for any number of rows per expert.

Rows are sorted by expert, and weights read by address, as in `experts.py`; a program's product is `split_sum`
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

from octavo.kernels.quantization import mixing_scale
from octavo.kernels.triton.experts import TritonExperts, addresses_of, max_blocks, rows_of_block, sort_by_group
from octavo.kernels.triton.integer_rows import integer_rows
from octavo.kernels.triton.low_bit_weight import Form, LowBitLinear, finished, form_of, split_sum
from octavo.kernels.triton.matmul import padded_rows, tiling_for
from octavo.kernels.triton.row_ops import activate
from octavo.kernels.types import Activation, PackedLinear

_ALIGNMENT = 16  # bytes


@triton.jit
def _low_bit_experts_kernel(
    x: tl.tensor,  # IS_INTO: [T, P]; else [R, Q], sorted by expert
    row_scales: tl.tensor,  # [T] or [R] float32, of x
    token_ids: tl.tensor,  # [R] int64, of pairs
    order: tl.tensor,  # [R] int64, pairs sorted by expert
    bounds: tl.tensor,  # [X + 1] int64: the pairs of expert e are order[bounds[e] ... bounds[e + 1] - 1]
    addresses: tl.tensor,  # [5, X] int64
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
    HAS_BIAS: tl.constexpr,
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
    bias = tl.load(parts + 4 * X).to(tl.pointer_type(out.dtype.element_ty))
    total = split_sum(
        *(x + sources * x_size, is_row, weight, scales, offsets, multipliers, here, num_outputs),
        *(0, in_size, FORM, ROWS, OUTPUTS),
    )
    total = finished(
        *(total, scales + here[:, None], row_scales + sources[None, :], bias + here[:, None]),
        *(FORM.scales_inside, HAS_ROW_SCALES, HAS_BIAS),
    )
    is_inside = (outputs < num_outputs)[:, None] & is_row[None, :]
    tl.store(out + targets[None, :] + columns[:, None], total.to(out.dtype.element_ty), mask=is_inside)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitExperts(TritonExperts):
    """Addresses are [5, X]: of weights, scales, offsets, multipliers and biases; absent ones point to the scales."""

    gate_up: tuple[LowBitLinear, ...]
    down: tuple[LowBitLinear, ...]
    mixing_scales: Tensor  # [X] float32, `mixing_scale` of each size
    form: Form
    row_size: int  # Q
    num_parts: int  # parts of the first linear's output: 2 if gated, else 1
    are_sizes_alike: bool  # each I is Q
    one_tiling: bool  # float weights, too, use the same tiling for any number of rows

    def compute_rows(self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, activation: Activation) -> Tensor:
        num_pairs, hidden_size = len(expert_ids), self.down[0].num_outputs
        pairs = token_ids, *sort_by_group(expert_ids, len(self.down))
        # Experts smaller than Q leave zeros: these do not change a row's integers, and are multiplied by zero weights.
        make = x.new_empty if self.are_sizes_alike else x.new_zeros
        middle, out = make(num_pairs, self.num_parts * self.row_size), x.new_empty(num_pairs, hidden_size)
        padded_size, rotation = self.gate_up[0].padded_size, self.gate_up[0].form.rotation
        if self.form.is_float:
            self._launch(padded_rows(x, padded_size), None, pairs, middle, is_into=True)
            self._launch(activate(middle, activation), None, pairs, out, is_into=False)
            return out
        rows = integer_rows(x, padded_size, rotation)
        self._launch(rows.values, rows.scales, pairs, middle, is_into=True)
        of_rows = expert_ids[pairs[1]]  # in the order of experts
        sizes = None if self.are_sizes_alike else (self.sizes[of_rows], self.mixing_scales[of_rows])
        rows = integer_rows(middle, self.row_size, rotation, activation=activation, sizes=sizes)
        self._launch(rows.values, rows.scales, pairs, out, is_into=False)
        return out

    def _launch(
        self,
        x: Tensor,
        row_scales: Tensor | None,
        pairs: tuple[Tensor, Tensor, Tensor],  # token_ids, order, bounds
        out: Tensor,
        *,
        is_into: bool,
    ) -> None:
        num_pairs, num_experts, hidden_size = len(pairs[0]), len(self.down), self.down[0].num_outputs
        # As many rows as an expert has on average: an expert with more takes several blocks.
        tiling = tiling_for(triton.cdiv(num_pairs, num_experts), x.dtype, one_tiling=self.one_tiling)
        max_outputs = self.num_parts * self.largest_size if is_into else hidden_size
        addresses = self.gate_up_addresses if is_into else self.down_addresses
        has_bias = (self.gate_up if is_into else self.down)[0].bias is not None
        grid = max_blocks(num_pairs, num_experts, tiling.rows), triton.cdiv(max_outputs, tiling.outputs)
        given_scales = addresses if row_scales is None else row_scales  # placeholder address, never read
        _low_bit_experts_kernel[grid](
            *(x, given_scales, *pairs, addresses, self.sizes, out, x.shape[1], hidden_size, self.row_size),
            FORM=self.form,
            X=num_experts,
            IS_INTO=is_into,
            PARTS=self.num_parts,
            HAS_ROW_SCALES=row_scales is not None,
            HAS_BIAS=has_bias,
            DIVISOR=self.size_divisor,
            X_BLOCK=triton.next_power_of_2(num_experts),
            ROWS=tiling.rows,
            OUTPUTS=tiling.outputs,
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
        )


def pack_low_bit_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], *, one_tiling: bool
) -> LowBitExperts:
    """Combine experts in place: gate_up of [2 * I, D], down of [D, I], all of one form."""
    into, back = _low_bit_linears(gate_up), _low_bit_linears(down)
    sizes, device = [linear.in_size for linear in back], back[0].weight.device
    [num_parts] = {linear.num_outputs // size for linear, size in zip(into, sizes, strict=True)}
    [(_, form)] = {(linear.form, form_of(linear)) for linear in (*into, *back)}
    row_size = max(linear.padded_size for linear in back)
    return LowBitExperts(
        gate_up=into,
        down=back,
        gate_up_addresses=_addresses(into),
        down_addresses=_addresses(back),
        gate_up_biases=None,
        down_biases=None,
        sizes=torch.tensor(sizes, dtype=torch.int32, device=device),
        mixing_scales=torch.tensor([mixing_scale(size) for size in sizes], device=device),
        form=form,
        largest_size=max(sizes),
        row_size=row_size,
        num_parts=num_parts,
        are_sizes_alike=set(sizes) == {row_size},
        size_divisor=math.gcd(_ALIGNMENT, *sizes),
        one_tiling=one_tiling,
    )


def _low_bit_linears(linears: Sequence[PackedLinear]) -> tuple[LowBitLinear, ...]:
    found = tuple(linear for linear in linears if isinstance(linear, LowBitLinear))
    assert len(found) == len(linears), "experts need low-bit weights"
    assert len({linear.bias is None for linear in found}) == 1, "all experts have biases, or none has"
    return found


def _addresses(linears: Sequence[LowBitLinear]) -> Tensor:
    parts = [
        [linear.weight for linear in linears],
        [linear.scales for linear in linears],
        [linear.scales if linear.offsets is None else linear.offsets for linear in linears],
        [linear.scales if linear.multipliers is None else linear.multipliers for linear in linears],
        [linear.scales if linear.bias is None else linear.bias for linear in linears],
    ]
    return torch.stack([addresses_of(of_experts) for of_experts in parts])
