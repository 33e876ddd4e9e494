"""RMS norm, with or without the residual addition, in one launch.

Legend: T = rows, D = size normalized over.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.arguments import aligned
from octavo.kernels.types import Fused


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,  # [T, D]
    residual: tl.tensor | None,  # [T, D]
    weight: tl.tensor,  # [D]
    out: tl.tensor,  # [T, D]
    total: tl.tensor | None,  # [T, D]
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row."""
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
    if OFFSET != 0.0:
        factors += OFFSET
    tl.store(out + places, (wide * scale * factors).to(row.dtype), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Normalize x [..., D] over its last dimension and scale by weight [D] + offset."""
    return add_rms_norm(x, Fused(residual=None, norm_weight=weight, eps=eps, norm_offset=offset))[0]


def add_rms_norm(x: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
    """Return (normalized x + residual, x + residual), each [..., D]; without a residual the sum is x itself."""
    x, size, residual = aligned(x), x.shape[-1], fused.residual
    out, total = torch.empty_like(x), None
    if residual is not None:
        residual, total = aligned(residual), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x,
        residual,
        fused.norm_weight,
        out,
        total,
        fused.eps,
        OFFSET=fused.norm_offset,
        SIZE=size,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        enable_fp_fusion=False,
    )
    return out, x if total is None else total
