"""Root mean square norm, with or without the sum before it, in one launch.

Legend: T = rows, D = size normalised over.
"""

import torch
import triton
from triton import language as tl

from octavo.kernels.triton.arguments import aligned


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,  # [T, D]
    residual: tl.tensor | None,  # [T, D]
    weight: tl.tensor,  # [D]
    out: tl.tensor,  # [T, D]
    total: tl.tensor | None,  # [T, D]
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row."""
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(x + places, mask=is_inside, other=0.0)
    if residual is not None:
        # Rounded to the dtype, as later layers read it; the norm is taken of the rounded sum.
        row = (row.to(tl.float32) + tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + places, row, mask=is_inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + places, (wide * scale * factors).to(row.dtype), mask=is_inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x [..., D] over its last dimension and scale by weight [D]."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised x + residual, x + residual), each [..., D]."""
    out, total = _launch(x, residual, weight, eps)
    assert total is not None
    return out, total


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, size = aligned(x), x.shape[-1]
    out, total = torch.empty_like(x), None
    if residual is not None:
        residual, total = aligned(residual), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        enable_fp_fusion=False,
    )
    return out, total
