"""Multi-LoRA, an adapter per row, over rows sorted by slot: down to the ranks in one launch, up again in one per part.

The down projection reads K inputs for few results, so it is split at fixed places over programs; the up projection adds
the splits in order. Tiles are the same for any number of rows, so a row's bits do not depend on the others.

Legend: T = rows, S = slots, P = parts, K = inputs, R = the largest rank, N = outputs, C = splits.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.reference import LoraAdapters
from octavo.kernels.triton.experts import max_blocks, rows_of_block, sort_by_group
from octavo.kernels.triton.row_ops import aligned

_ROWS, _INPUTS, _OUTPUTS, _RANKS = tl.constexpr(16), tl.constexpr(64), tl.constexpr(128), tl.constexpr(16)
_SPLIT = tl.constexpr(512)  # inputs


@triton.jit
def _down_kernel(
    x: tl.tensor,  # [T, K]
    down: tl.tensor,  # [S, P * R, K]
    used: tl.tensor,  # [S] int32, each slot's rank
    order: tl.tensor,  # [T] int64
    bounds: tl.tensor,  # [S + 1] int64
    sums: tl.tensor,  # [C, T, P * R] float32
    num_rows: tl.tensor,
    in_size: tl.tensor,  # K
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
) -> None:
    slot, places, is_row = rows_of_block(tl.program_id(0), bounds, S, GROUPS, _ROWS)
    if slot >= S:
        return
    blocks_of_part: tl.constexpr = (R + _RANKS - 1) // _RANKS
    part, ranks = tl.program_id(2) // blocks_of_part, tl.program_id(2) % blocks_of_part * _RANKS + tl.arange(0, _RANKS)
    is_rank = ranks < tl.load(used + slot)
    if tl.sum(is_rank.to(tl.int32)) == 0:
        return
    rows = tl.load(order + places, mask=is_row, other=0)
    columns = part * R + ranks  # of `sums`; rows of the slot's `down`
    weights = down + ((slot + tl.zeros((1,), tl.int64)) * P * R + columns) * in_size  # [_RANKS]
    total = tl.zeros((_ROWS, _RANKS), tl.float32)
    for start in range(0, _SPLIT, _INPUTS):
        inputs = tl.program_id(1) * _SPLIT + start + tl.arange(0, _INPUTS)
        is_input = (inputs < in_size)[None, :]
        left = tl.load(x + rows[:, None] * in_size + inputs[None, :], mask=is_row[:, None] & is_input, other=0.0)
        right = tl.load(weights[:, None] + inputs[None, :], mask=is_rank[:, None] & is_input, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
    targets = (tl.program_id(1) * num_rows + rows)[:, None] * P * R + columns[None, :]
    tl.store(sums + targets, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _up_kernel(
    sums: tl.tensor,  # [C, T, P * R] float32, from this part's first rank on
    up: tl.tensor,  # [S, R, N], from this part's first output on
    used: tl.tensor,  # [S] int32
    order: tl.tensor,  # [T] int64
    bounds: tl.tensor,  # [S + 1] int64
    out: tl.tensor,  # [T, N], from this part's first output on: the sum, in place
    num_rows: tl.tensor,
    num_outputs: tl.tensor,  # N
    part_size: tl.tensor,  # outputs of this part
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,  # C
) -> None:
    slot, places, is_row = rows_of_block(tl.program_id(0), bounds, S, GROUPS, _ROWS)
    if slot >= S:
        return
    rank = tl.load(used + slot)
    rows = tl.load(order + places, mask=is_row, other=0)
    outputs = tl.program_id(1) * _OUTPUTS + tl.arange(0, _OUTPUTS)
    is_output = (outputs < part_size)[None, :]
    weights = up + (slot + tl.zeros((1,), tl.int64)) * R * num_outputs + outputs  # [_OUTPUTS]
    added = tl.zeros((_ROWS, _OUTPUTS), tl.float32)
    for first in range(0, rank, _RANKS):
        ranks = first + tl.arange(0, _RANKS)
        is_rank = ranks < rank
        middle = tl.zeros((_ROWS, _RANKS), tl.float32)
        for split in tl.static_range(SPLITS):
            sources = (split * num_rows + rows)[:, None] * P * R + ranks[None, :]
            middle += tl.load(sums + sources, mask=is_row[:, None] & is_rank[None, :], other=0.0)
        right = tl.load(weights[None, :] + ranks[:, None] * num_outputs, mask=is_rank[:, None] & is_output, other=0.0)
        added = tl.dot(middle, right.to(tl.float32), added, input_precision="tf32x3")
    targets = rows[:, None] * num_outputs + outputs[None, :]
    is_inside = is_row[:, None] & is_output & (rank > 0)
    total = tl.load(out + targets, mask=is_inside, other=0.0).to(tl.float32) + added
    tl.store(out + targets, total.to(out.dtype.element_ty), mask=is_inside)


def add_lora(
    base: Tensor,  # [T, N]
    x: Tensor,  # [T, K]
    adapters: LoraAdapters,
    adapter_ids: Tensor,  # [T], -1: none
) -> Tensor:  # [T, N]
    """Add each row's adapter output to base, in place. Does not sync with the device."""
    x, out, (num_rows, in_size) = aligned(x), base.contiguous(), x.shape
    num_slots, max_rank, num_outputs = adapters.up.shape
    if num_rows == 0:
        return out
    order, bounds = sort_by_group(adapter_ids, num_slots)
    num_parts, num_splits = len(adapters.parts), triton.cdiv(in_size, _SPLIT.value)
    sums = torch.empty(num_splits, num_rows, num_parts * max_rank, dtype=torch.float32, device=x.device)
    num_blocks = max_blocks(num_rows, num_slots, _ROWS.value)
    sizes = {"S": num_slots, "GROUPS": triton.next_power_of_2(num_slots), "P": num_parts, "R": max_rank}
    _down_kernel[num_blocks, num_splits, num_parts * triton.cdiv(max_rank, _RANKS.value)](
        *(x, adapters.down, adapters.ranks, order, bounds, sums, num_rows, in_size), **sizes
    )
    start = 0
    for part, part_size in enumerate(adapters.parts):
        _up_kernel[num_blocks, triton.cdiv(part_size, _OUTPUTS.value)](
            *(sums[:, :, part * max_rank :], adapters.up[:, :, start:], adapters.ranks, order, bounds),
            *(out[:, start:], num_rows, num_outputs, part_size),
            SPLITS=num_splits,
            **sizes,
        )
        start += part_size
    return out
