"""Adapters with random weights, of which a part of the ranks is in use, and the formula they are tested against.

Legend: T = rows, S = slots, P = parts, K = inputs, R = the largest rank, N = outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.reference import Kernels, LoraAdapters


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A merged linear with slots for adapters."""

    in_size: int
    parts: tuple[int, ...]
    max_rank: int
    ranks: tuple[int, ...]  # [S]

    @property
    def num_outputs(self) -> int:
        """N."""
        return sum(self.parts)


QKV = Shape(in_size=100, parts=(48, 20, 20), max_rank=16, ranks=(16, 3, 0, 9))
DOWN = Shape(in_size=1500, parts=(130,), max_rank=40, ranks=(40, 1, 8, 17))
GATE_UP = Shape(in_size=64, parts=(70, 70), max_rank=8, ranks=(8, 8, 5, 0))


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the same numbers on whatever device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def adapters_of(kernels: Kernels, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> LoraAdapters:
    """Fill all slots. What lies beyond a slot's rank is NaN: nothing may read it."""
    slots, rank = len(shape.ranks), shape.max_rank
    adapters = kernels.empty_lora(slots, rank, shape.in_size, shape.parts, dtype=dtype, device=torch.device(device))
    adapters.down.copy_(random(slots, len(shape.parts) * rank, shape.in_size, dtype=dtype) * shape.in_size**-0.5)
    adapters.up.copy_(random(slots, rank, shape.num_outputs, dtype=dtype) * rank**-0.5)
    adapters.ranks.copy_(torch.tensor(shape.ranks))
    for slot, used in enumerate(shape.ranks):
        adapters.up[slot, used:] = torch.nan
        adapters.down[slot].view(len(shape.parts), rank, -1)[:, used:] = torch.nan
    return adapters


def formula(base: torch.Tensor, x: torch.Tensor, adapters: LoraAdapters, adapter_ids: Sequence[int]) -> torch.Tensor:
    """Return base + up(down(x)) in float64, row by row."""
    rows = []
    for row, slot in enumerate(adapter_ids):
        added = torch.zeros(base.shape[1], dtype=torch.float64, device=base.device)
        if slot >= 0:
            rank, start = int(adapters.ranks[slot]), 0
            for part, size in enumerate(adapters.parts):
                down = adapters.down[slot, part * adapters.max_rank :][:rank].double()
                up = adapters.up[slot, :rank, start : start + size].double()
                added[start : start + size] = x[row].double() @ down.T @ up
                start += size
        rows.append(base[row].double() + added)
    return torch.stack(rows)
