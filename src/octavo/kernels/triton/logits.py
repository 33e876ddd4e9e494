"""Rows of logits before and after sampling: penalties and masks; the parts of log-probabilities.

Penalties take two launches: a row's tokens are counted, then penalties are applied. Nothing is kept between steps:
contexts are on the device, and counting one costs far less than attending to it. So no state can go stale after a
preemption, or while a step is in flight.

Log-probabilities take one pass: the mass of a row, a token's rank, the most likely tokens. Tokens are compared by
64-bit keys: the logit in ordered form in the high bits, the complement of the id in the low ones. No two are equal, so
the result depends neither on how a row is split nor on the order of the parts.

Legend: L = rows, V = vocabulary size, N = rows of the worker, C = max tokens per context, M = masks, W = words of a
mask, P = parts of a row, K = how many of the most likely.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.draw import key_of

_TOKENS, _IDS = tl.constexpr(1024), tl.constexpr(2048)  # per program
_IN_PROMPT = tl.constexpr(1 << 30)  # flag above the count of outputs
_PART = tl.constexpr(4096)  # ids per program
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _count_kernel(
    table: tl.tensor,  # [N, row_size] int32, tokens
    rows: tl.tensor,  # [L] int64, rows of the table
    num_tokens: tl.tensor,  # [L] int64, in the context
    num_prompt_tokens: tl.tensor,  # [L] int64
    repetition: tl.tensor,  # [L] float64
    presence: tl.tensor,  # [L] float64
    frequency: tl.tensor,  # [L] float64
    counts: tl.tensor,  # [L, V] int32, zeros at first, out
    row_size: tl.tensor,
    vocab_size: tl.tensor,  # V
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if _is_penalized(repetition, presence, frequency, row):
        places = tl.program_id(1) * _TOKENS + tl.arange(0, _TOKENS)
        is_token = places < tl.load(num_tokens + row)
        ids = tl.load(table + tl.load(rows + row) * row_size + places, mask=is_token, other=0)
        is_token = is_token & (ids < vocab_size)
        is_prompt = places < tl.load(num_prompt_tokens + row)
        tl.atomic_or(counts + row * vocab_size + ids, _IN_PROMPT, mask=is_token & is_prompt, sem="relaxed")
        tl.atomic_add(counts + row * vocab_size + ids, 1, mask=is_token & (is_prompt == 0), sem="relaxed")


@triton.jit
def _is_penalized(repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor, row: tl.tensor) -> tl.tensor:
    is_repetition = tl.load(repetition + row) != 1.0
    return is_repetition | (tl.load(presence + row) != 0.0) | (tl.load(frequency + row) != 0.0)


@triton.jit
def _process_logits_kernel(
    logits: tl.tensor,  # [L, V] float32
    counts: tl.tensor,  # [L, V] int32
    repetition: tl.tensor,  # [L] float64
    presence: tl.tensor,  # [L] float64
    frequency: tl.tensor,  # [L] float64
    mask_indices: tl.tensor,  # [L] int64; below 0: no mask
    masks: tl.tensor,  # [M, W] int32
    out: tl.tensor,  # [L, V] float32, aliases the counts
    vocab_size: tl.tensor,  # V
    num_words: tl.tensor,  # W
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * _IDS + tl.arange(0, _IDS)
    is_id, places = ids < vocab_size, row * vocab_size + ids
    logit = tl.load(logits + places, mask=is_id, other=0.0)
    if _is_penalized(repetition, presence, frequency, row):
        count = tl.load(counts + places, mask=is_id, other=0)
        factor = tl.load(repetition + row).to(tl.float32)
        repeated = tl.where(logit < 0, logit * factor, tl.div_rn(logit, tl.zeros_like(logit) + factor))
        logit = tl.where(count > 0, repeated, logit)
        num_generated = count & (_IN_PROMPT - 1)
        less = (num_generated.to(tl.float64) * tl.load(frequency + row) + tl.load(presence + row)).to(tl.float32)
        logit = tl.where(num_generated > 0, logit - less, logit)
    index = tl.load(mask_indices + row)
    if index >= 0:
        words = tl.load(masks + index * num_words + ids // 32, mask=is_id, other=0)
        logit = tl.where((words >> (ids % 32)) & 1 != 0, logit, float("-inf"))
    tl.store(out + places, logit, mask=is_id)


def process_logits(
    logits: Tensor,
    context: tuple[Tensor, Tensor, Tensor, Tensor],
    max_context: int,
    penalties: tuple[Tensor, Tensor, Tensor],
    mask_indices: Tensor,
    masks: Tensor,
) -> Tensor:
    """Return logits [L, V] float32 after penalties and masks; a copy.

    The context is (tokens [N, .] int32, rows [L] of it, tokens in each [L], and prompt tokens in each [L]), at most
    `max_context` in each; penalties are (repetition, presence, frequency), [L] float64 each. Row j may sample what
    masks[mask_indices[j]] allows, masks [M, W] int32; below 0: everything.
    """
    (num_rows, vocab_size), (table, *counted) = logits.shape, context
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    processed = counts.view(torch.float32)
    _count_kernel[num_rows, triton.cdiv(max_context, _TOKENS.value)](
        table, *counted, *penalties, counts, table.shape[1], vocab_size
    )
    _process_logits_kernel[num_rows, triton.cdiv(vocab_size, _IDS.value)](
        *(logits.contiguous(), counts, *penalties, mask_indices, masks, processed, vocab_size, masks.shape[1]),
        enable_fp_fusion=False,
    )
    return processed


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
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = tl.load(max_logit + row)
    if (tl.load(is_wanted + row) >= 0) & (tl.abs(peak) < float("inf")):
        ids = part * _PART + tl.arange(0, _PART)
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
    num_parts = triton.cdiv(vocab_size, _PART.value)
    totals = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    ranks, candidates = torch.ones_like(totals), totals.new_zeros(num_rows, num_parts, count)
    _rate_kernel[num_rows, num_parts](
        *(logits.contiguous(), max_logit, chosen, is_wanted, totals, ranks, candidates, vocab_size, num_parts),
        K=count,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return totals, ranks, candidates.view(num_rows, -1).topk(count).values
