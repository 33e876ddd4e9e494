"""The linears of many experts in two launches: rows are sorted by expert, weights are read in place, by address.

Tiles are the same for any number of rows, so a row's bits do not depend on the others. An expert with few rows wastes
most of a tile; its cost is reading the weights, 64 operations per byte, of the 184 that an H200 can do.

Legend: T = tokens, X = experts (a shared one is the last), D = hidden size, I = intermediate size of an expert,
R = pairs of a token and an expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.activation import constants, gated, squared
from octavo.kernels.triton.arguments import aligned
from octavo.kernels.triton.grouped_rows import max_blocks, rows_of_block, sort_by_group
from octavo.kernels.types import Activation, PackedExperts, PackedLinear

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64  # tile: rows, outputs, inputs
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonExperts(PackedExperts):
    """Experts with the tables that the kernel reads. The tuples keep the addressed memory alive."""

    gate_up_addresses: Tensor  # [X] int64, of weights [2 * I, D], gates first
    down_addresses: Tensor  # [X] int64, of weights [D, I]
    sizes: Tensor  # [X] int32, each expert's I
    largest_size: int
    size_divisor: int  # divides each I: elements that are contiguous and aligned wherever a row begins


def pack_experts(gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> TritonExperts:
    """Combine experts: gate_up of [2 * I, D], or [I, D] if not gated, down of [D, I]."""
    assert all(linear.bias is None for linear in (*gate_up, *down)), "experts have no biases"
    linears = *gate_up, *down
    assert all(linear.weight.is_contiguous() and linear.weight.data_ptr() % _ALIGNMENT == 0 for linear in linears)
    sizes, device = [linear.weight.shape[1] for linear in down], down[0].weight.device
    return TritonExperts(
        gate_up=tuple(gate_up),
        down=tuple(down),
        gate_up_addresses=torch.tensor([linear.weight.data_ptr() for linear in gate_up], device=device),
        down_addresses=torch.tensor([linear.weight.data_ptr() for linear in down], device=device),
        sizes=torch.tensor(sizes, dtype=torch.int32, device=device),
        largest_size=max(sizes),
        size_divisor=math.gcd(_ALIGNMENT, *sizes),
    )


@triton.jit
def _experts_kernel(
    x: tl.tensor,  # IS_INTO: [T, D]; else [R, row_size], sorted by expert
    token_ids: tl.tensor,  # [R] int64, of pairs
    order: tl.tensor,  # [R] int64, pairs sorted by expert
    bounds: tl.tensor,  # [X + 1] int64: the pairs of expert e are order[bounds[e] ... bounds[e + 1] - 1]
    addresses: tl.tensor,  # [X] int64
    sizes: tl.tensor,  # [X] int32
    out: tl.tensor,  # IS_INTO: [R, row_size], sorted by expert; else [R, D], in pair order
    row_size: tl.tensor,  # the largest I
    X: tl.constexpr,
    D: tl.constexpr,
    IS_INTO: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    DIVISOR: tl.constexpr,
    X_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """A program computes one tile of one expert's output, or nothing: the grid is an upper bound."""
    IS_GATED: tl.constexpr = IS_INTO and KIND != "relu2"
    expert, rows, is_row = rows_of_block(tl.program_id(0), bounds, X, X_BLOCK, ROWS)
    if expert >= X:
        return
    pairs = tl.load(order + rows, mask=is_row, other=0)

    dtype: tl.constexpr = x.dtype.element_ty
    weight = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(dtype)), 16)
    size = tl.multiple_of(tl.load(sizes + expert), DIVISOR)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if IS_INTO:
        in_size, num_outputs = D, size
        sources = tl.load(token_ids + pairs, mask=is_row, other=0) * D
    else:
        in_size, num_outputs = size, D
        sources = rows.to(tl.int64) * row_size
    if tl.program_id(1) * COLUMNS >= num_outputs:
        return
    is_column = columns < num_outputs
    places = columns.to(tl.int64) * in_size
    result = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, in_size, DEPTH):
        inputs = start + tl.arange(0, DEPTH)
        is_input = inputs < in_size
        x_tile = tl.load(x + sources[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        w_mask = is_column[:, None] & is_input[None, :]
        w_places = weight + places[:, None] + inputs[None, :]
        result = tl.dot(x_tile, tl.trans(tl.load(w_places, mask=w_mask, other=0.0)), result, input_precision="tf32x3")
        if IS_GATED:
            up_tile = tl.load(w_places + size.to(tl.int64) * D, mask=w_mask, other=0.0)
            up = tl.dot(x_tile, tl.trans(up_tile), up, input_precision="tf32x3")
    if IS_INTO:
        # Rounded to the dtype first, as with a separate activation op.
        result = result.to(dtype).to(tl.float32)
        if KIND == "relu2":
            result = squared(result)
        if IS_GATED:
            result = gated(result, up.to(dtype).to(tl.float32), KIND, LIMIT, ALPHA)
        targets = rows.to(tl.int64) * row_size
    else:
        targets = pairs * D
    tl.store(out + targets[:, None] + columns[None, :], result.to(dtype), mask=is_row[:, None] & is_column[None, :])


def expert_rows(
    x: Tensor,  # [T, D]
    token_ids: Tensor,  # [R] int64
    expert_ids: Tensor,  # [R] int64
    experts: TritonExperts,
    activation: Activation,
) -> Tensor:  # [R, D]
    """Return in row r the output of expert expert_ids[r] on token token_ids[r]. Does not sync with the device."""
    x, (num_pairs, num_experts) = aligned(x), (len(expert_ids), len(experts.down))
    order, bounds = sort_by_group(expert_ids, num_experts)
    middle, out = x.new_empty(num_pairs, experts.largest_size), x.new_empty(num_pairs, x.shape[1])
    linears = (x, experts.gate_up_addresses, middle), (middle, experts.down_addresses, out)
    num_blocks = max_blocks(num_pairs, num_experts, _ROWS)
    for is_into, (inputs, addresses, outputs) in zip((True, False), linears, strict=True):
        _experts_kernel[num_blocks, triton.cdiv(outputs.shape[1], _COLUMNS)](
            inputs,
            token_ids,
            order,
            bounds,
            addresses,
            experts.sizes,
            outputs,
            experts.largest_size,
            X=num_experts,
            D=x.shape[1],
            IS_INTO=is_into,
            **constants(activation),
            DIVISOR=experts.size_divisor,
            X_BLOCK=triton.next_power_of_2(num_experts),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,
        )
    return out
