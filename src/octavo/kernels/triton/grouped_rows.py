"""Rows sorted by group and cut into blocks of one group each.

The number of blocks per group is known on the device alone: the host launches the upper bound, and never waits for a
count.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def rows_of_block(
    block: tl.tensor,
    bounds: tl.tensor,  # [NUM_GROUPS + 1] int64: group g has rows order[bounds[g] ... bounds[g + 1] - 1]
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least NUM_GROUPS
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (a block's group, at least NUM_GROUPS past the last; its positions in the order [ROWS]; which exist)."""
    numbers = tl.arange(0, GROUPS)
    begins = tl.load(bounds + numbers, mask=numbers < NUM_GROUPS, other=0).to(tl.int32)
    ends = tl.load(bounds + numbers + 1, mask=numbers < NUM_GROUPS, other=0).to(tl.int32)
    num_blocks = (ends - begins + ROWS - 1) // ROWS
    last_blocks = tl.cumsum(num_blocks, axis=0)
    group = tl.sum((last_blocks <= block).to(tl.int32), axis=0)
    is_group = numbers == group
    first_block = tl.sum(tl.where(is_group, last_blocks - num_blocks, 0), axis=0)
    begin, end = tl.sum(tl.where(is_group, begins, 0), axis=0), tl.sum(tl.where(is_group, ends, 0), axis=0)
    rows = begin + (block - first_block) * ROWS + tl.arange(0, ROWS)
    return group, rows, rows < end


def sort_by_group(group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return (rows [T] sorted by their group_ids [T], bounds [num_groups + 1]); ids below 0 mean no group."""
    ordered, order = group_ids.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(num_groups + 1, device=ordered.device, dtype=ordered.dtype))


def max_blocks(num_rows: int, num_groups: int, rows: int) -> int:
    """Return the upper bound on blocks: full ones, plus a partial one per group; no more than rows."""
    return min(num_rows, num_rows // rows + num_groups)
