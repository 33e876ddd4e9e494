"""Expert routing, in one launch after the router's matmul.

Legend: T = tokens, X = experts, C = experts per token.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.types import Routes, Routing


@triton.jit
def _route_kernel(
    logits: tl.tensor,  # [T, X], or [T, X + 1] with a shared expert; float32
    expert_ids: tl.tensor,  # [T, C] int64
    weights: tl.tensor,  # [T, C] float32
    X: tl.constexpr,
    C: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    X_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
) -> None:
    """One program per token: repeatedly takes the largest of the remaining logits."""
    token = tl.program_id(0).to(tl.int64)
    HAS_SHARED: tl.constexpr = C > TOP_K
    numbers, places = tl.arange(0, X_BLOCK), tl.arange(0, C_BLOCK)
    row = logits + token * (X + HAS_SHARED)
    of_all = tl.load(row + numbers, mask=numbers < X, other=float("-inf"))
    left = of_all
    chosen = tl.full([C_BLOCK], float("-inf"), dtype=tl.float32)
    chosen_ids = tl.zeros([C_BLOCK], dtype=tl.int64)
    for choice in range(TOP_K):
        largest = tl.max(left, axis=0)
        # Of ties, the lowest index; if all are NaN, any remaining one.
        number = tl.minimum(tl.min(tl.where(left == largest, numbers, X_BLOCK), axis=0), X - 1)
        chosen = tl.where(places == choice, largest, chosen)
        chosen_ids = tl.where(places == choice, number.to(tl.int64), chosen_ids)
        left = tl.where(numbers == number, float("-inf"), left)
    first = tl.max(of_all, axis=0)
    powers = tl.exp(chosen - first)
    total = tl.sum(powers, axis=0) if RENORMALIZES else tl.sum(tl.exp(of_all - first), axis=0)
    shares = powers / total
    if HAS_SHARED:
        is_shared = places == TOP_K
        chosen_ids = tl.where(is_shared, X, chosen_ids)
        shares = tl.where(is_shared, 1.0 / (1.0 + tl.exp(-tl.load(row + X))), shares)
    tl.store(expert_ids + token * C + places, chosen_ids, mask=places < C)
    tl.store(weights + token * C + places, shares, mask=places < C)


def route(logits: Tensor, routing: Routing) -> Routes:
    """Choose experts by logits [T, X], or [T, X + 1] with a shared expert, float32."""
    num_choices = routing.num_choices
    logits = logits.contiguous()
    expert_ids = torch.empty(len(logits), num_choices, dtype=torch.int64, device=logits.device)
    weights = torch.empty(len(logits), num_choices, dtype=torch.float32, device=logits.device)
    _route_kernel[(len(logits),)](
        logits,
        expert_ids,
        weights,
        X=routing.num_experts,
        C=num_choices,
        TOP_K=routing.top_k,
        RENORMALIZES=routing.renormalizes,
        X_BLOCK=triton.next_power_of_2(routing.num_experts),
        C_BLOCK=triton.next_power_of_2(num_choices),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return Routes(expert_ids=expert_ids, weights=weights)
