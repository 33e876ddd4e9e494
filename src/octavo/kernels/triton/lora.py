"""Multi-LoRA, an adapter per row, in two launches over rows sorted by adapter: down to the rank, and up again.

The down projection reads K inputs for few results, so it is split at fixed places over programs; the up projection adds
the splits in order. Tiles are the same for any number of rows, so a row's bits do not depend on the others.

Legend: T = rows, A = adapters, K = inputs, R = rank, N = outputs, S = splits.
"""

import torch
import triton
from triton import language as tl

from octavo.kernels.triton.arguments import aligned
from octavo.kernels.triton.grouped_rows import max_blocks, rows_of_block, sort_by_group
from octavo.kernels.types import LoraAdapters

_ROWS, _INPUTS, _OUTPUTS = 16, 64, 128
_SPLIT = 512  # inputs


@triton.jit
def _down_kernel(
    x: tl.tensor,  # [T, K]
    down: tl.tensor,  # [A, R, K]
    order: tl.tensor,  # [T] int64
    bounds: tl.tensor,  # [A + 1] int64
    parts: tl.tensor,  # [S, T, R] float32
    num_rows: tl.tensor,
    in_size: tl.tensor,  # K
    A: tl.constexpr,
    GROUPS: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,  # a power of two, at least R and 16
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    adapter, places, is_row = rows_of_block(tl.program_id(0), bounds, A, GROUPS, ROWS)
    if adapter >= A:
        return
    rows = tl.load(order + places, mask=is_row, other=0)
    ranks = tl.arange(0, RANKS)
    weights = down + (adapter + tl.zeros((1,), tl.int64)) * R * in_size + ranks * in_size  # [RANKS]
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, SPLIT, INPUTS):
        inputs = tl.program_id(1) * SPLIT + start + tl.arange(0, INPUTS)
        is_input = (inputs < in_size)[None, :]
        left = tl.load(x + rows[:, None] * in_size + inputs[None, :], mask=is_row[:, None] & is_input, other=0.0)
        right = tl.load(weights[:, None] + inputs[None, :], mask=(ranks < R)[:, None] & is_input, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
    targets = (tl.program_id(1) * num_rows + rows)[:, None] * R + ranks[None, :]
    tl.store(parts + targets, total, mask=is_row[:, None] & (ranks < R)[None, :])


@triton.jit
def _up_kernel(
    base: tl.tensor,  # [T, N]
    parts: tl.tensor,  # [S, T, R] float32
    up: tl.tensor,  # [A, N, R]
    order: tl.tensor,  # [T] int64
    bounds: tl.tensor,  # [A + 1] int64
    out: tl.tensor,  # [T, N]
    num_rows: tl.tensor,
    num_outputs: tl.tensor,  # N
    A: tl.constexpr,
    GROUPS: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,  # S
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    adapter, places, is_row = rows_of_block(tl.program_id(0), bounds, A, GROUPS, ROWS)
    if adapter >= A:
        return
    rows = tl.load(order + places, mask=is_row, other=0)
    ranks = tl.arange(0, RANKS)
    is_rank = (ranks < R)[None, :]
    middle = tl.zeros((ROWS, RANKS), tl.float32)
    for split in tl.static_range(SPLITS):
        sources = (split * num_rows + rows)[:, None] * R + ranks[None, :]
        middle += tl.load(parts + sources, mask=is_row[:, None] & is_rank, other=0.0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights = up + (adapter + tl.zeros((1,), tl.int64)) * num_outputs * R + outputs * R  # [OUTPUTS]
    right = tl.load(weights[:, None] + ranks[None, :], mask=(outputs < num_outputs)[:, None] & is_rank, other=0.0)
    added = tl.dot(middle.to(right.dtype), tl.trans(right), input_precision="tf32x3")
    targets = rows[:, None] * num_outputs + outputs[None, :]
    is_inside = is_row[:, None] & (outputs < num_outputs)[None, :]
    total = tl.load(base + targets, mask=is_inside, other=0.0).to(tl.float32) + added
    tl.store(out + targets, total.to(out.dtype.element_ty), mask=is_inside)


def add_lora(
    base: torch.Tensor,  # [T, N]
    x: torch.Tensor,  # [T, K]
    adapters: LoraAdapters,
    adapter_ids: torch.Tensor,  # [T], -1: none
) -> torch.Tensor:  # [T, N]
    """Return base plus each row's adapter output. Does not sync with the device."""
    x, (num_rows, in_size), (num_adapters, num_outputs, rank) = aligned(x), x.shape, adapters.up.shape
    out = base.clone(memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    order, bounds = sort_by_group(adapter_ids, num_adapters)
    num_splits = triton.cdiv(in_size, _SPLIT)
    parts = torch.empty(num_splits, num_rows, rank, dtype=torch.float32, device=x.device)
    num_blocks = max_blocks(num_rows, num_adapters, _ROWS)
    sizes = {
        "A": num_adapters,
        "GROUPS": triton.next_power_of_2(num_adapters),
        "R": rank,
        "RANKS": max(16, triton.next_power_of_2(rank)),
        "ROWS": _ROWS,
    }
    _down_kernel[num_blocks, num_splits](
        *(x, adapters.down, order, bounds, parts, num_rows, in_size), SPLIT=_SPLIT, INPUTS=_INPUTS, **sizes
    )
    _up_kernel[num_blocks, triton.cdiv(num_outputs, _OUTPUTS)](
        *(base.contiguous(), parts, adapters.up, order, bounds, out, num_rows, num_outputs),
        SPLITS=num_splits,
        OUTPUTS=_OUTPUTS,
        **sizes,
    )
    return out
