"""The gate of SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up. Legend: T = tokens, I = intermediate size."""

import torch
import triton
from triton import language as tl

from octavo.kernels.triton.arguments import aligned

_BLOCK = 1024


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return silu(gate) * up, of float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul_kernel(
    gate_up: tl.tensor,  # [T, 2 * I]
    out: tl.tensor,  # [T, I]
    size: tl.tensor,  # I
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    places = gate_up + row * 2 * size + columns
    gate = tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(places + size, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, gated(gate, up).to(out.dtype.element_ty), mask=is_inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map gate_up [T, 2 * I], gate first, to silu(gate) * up, [T, I]."""
    gate_up, size = aligned(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    grid = len(gate_up), triton.cdiv(size, _BLOCK)
    _silu_and_mul_kernel[grid](gate_up, out, size, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out
