"""The weighted sum of a token's expert outputs. Legend: T = tokens, C = experts per token, D = hidden size."""

import triton
from torch import Tensor
from triton import language as tl

_BLOCK = 1024


@triton.jit
def _combine_kernel(
    rows: tl.tensor,  # [T, C, D]
    weights: tl.tensor,  # [T, C] float32
    out: tl.tensor,  # [T, D]
    size: tl.tensor,  # D
    C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """In the order of a token's experts, each product rounded before it is added."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(C):
        answer = tl.load(rows + (token * C + choice) * size + columns, mask=is_inside, other=0.0).to(tl.float32)
        total += answer * tl.load(weights + token * C + choice)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=is_inside)


def combine_experts(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum rows [T, C, D] weighted by weights [T, C] float32: [T, D]."""
    num_tokens, num_choices, size = rows.shape
    out = rows.new_empty(num_tokens, size)
    grid = num_tokens, triton.cdiv(size, _BLOCK)
    _combine_kernel[grid](
        rows.contiguous(), weights.contiguous(), out, size, C=num_choices, BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out
