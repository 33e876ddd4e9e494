"""Rows that belong to groups, sorted by group, and cut into blocks of which each is of one group.

How many blocks a group has is known on the device alone: the host launches as many as there could be at most, and
nobody waits for a count.
"""

import torch
import triton
from triton import language as tl


@triton.jit
def rows_of_block(
    block: tl.tensor,
    bounds: tl.tensor,  # [NUM_GROUPS + 1] int64: rows bounds[g] ... bounds[g + 1] - 1 of the order are group g's
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least NUM_GROUPS
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (a block's group, at least NUM_GROUPS behind the last; its rows in the order [ROWS]; which are there)."""
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


def sort_by_group(group_ids: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the rows [T] in the order of their groups [T], bounds [num_groups + 1]); below 0 is no group."""
    ordered, order = group_ids.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(num_groups + 1, device=ordered.device, dtype=ordered.dtype))


def max_blocks(num_rows: int, num_groups: int, rows: int) -> int:
    """Return how many blocks there can be: full ones, and one begun for each group; no more than rows."""
    return min(num_rows, num_rows // rows + num_groups)
