"""The parts of log-probabilities, in one pass: the mass of a row, a token's rank, the most likely tokens.

Tokens are compared by 64-bit keys: the logit in ordered form in the high bits, the complement of the id in the low
ones. No two are equal, so the result depends neither on how a row is split nor on the order of the parts.

Legend: L = rows, V = vocabulary size, P = parts of a row, K = how many of the most likely.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.threshold import key_of

_PART = 4096  # ids per program
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _rate_kernel(
    logits: tl.tensor,  # [L, V] float32
    max_logit: tl.tensor,  # [L] float32
    chosen: tl.tensor,  # [L] float32, the logit of the token to rank
    is_wanted: tl.tensor,  # [L] int64; below 0: skip the row
    totals: tl.tensor,  # [L] int64, zeros at first, out: masses
    ranks: tl.tensor,  # [L] int64, ones at first, out
    candidates: tl.tensor,  # [L, P, K] int64, out: the largest keys of each part
    vocab_size: tl.tensor,  # V
    num_parts: tl.tensor,  # P
    K: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = tl.load(max_logit + row)
    if (tl.load(is_wanted + row) >= 0) & (tl.abs(peak) < float("inf")):
        ids = part * PART + tl.arange(0, PART)
        is_id = ids < vocab_size
        logit = tl.load(logits + row * vocab_size + ids, mask=is_id, other=float("-inf"))
        relative = logit.to(tl.float64) - peak.to(tl.float64)
        masses = (tl.exp(relative) * 17592186044416.0).to(tl.int64)
        tl.atomic_add(totals + row, tl.sum(masses, axis=0), sem="relaxed")
        is_above = logit > tl.load(chosen + row)
        tl.atomic_add(ranks + row, tl.sum(is_above.to(tl.int64), axis=0), sem="relaxed")
        keys = tl.where(is_id, key_of(logit) * 4294967296 + (2147483647 - ids), _LEAST)
        for place in range(K):
            best = tl.max(keys, axis=0)
            tl.store(candidates + (row * num_parts + part) * K + place, best)
            keys = tl.where(keys == best, _LEAST, keys)


def rate(
    logits: Tensor, max_logit: Tensor, chosen: Tensor, is_wanted: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return masses [L], ranks [L] and the largest `count` keys [L, count], best first, all int64.

    logits are [L, V] float32, with maxima and chosen logits [L]; results are undefined for rows where is_wanted [L]
    int64 is below 0, or where the largest logit is not finite. `count` is at most V.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    totals = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    ranks, candidates = torch.ones_like(totals), totals.new_zeros(num_rows, num_parts, count)
    _rate_kernel[num_rows, num_parts](
        logits.contiguous(),
        max_logit,
        chosen,
        is_wanted,
        totals,
        ranks,
        candidates,
        vocab_size,
        num_parts,
        K=count,
        PART=_PART,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return totals, ranks, candidates.view(num_rows, -1).topk(count).values
