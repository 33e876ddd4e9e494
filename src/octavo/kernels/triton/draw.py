"""Sampling: the argmax of log p + Gumbel noise per row of logits, in one pass, without storing the noise.

Filtered rows have a threshold (`threshold.py`); a block with no logit above it computes no noise.

Philox4x32-10 (Salmon et al., SC 2011) yields four words for four neighbors: counter (id >> 2, output index, 0, 0), word
id & 3. Scores are float64, computed by the same operations in the same order as in `sampling/noise.py` and
`sampling/mass.py`; only the two logarithms are the device's, the same ones that torch calls on a GPU.

Legend: L = rows, V = vocabulary size, P = parts of a row, each searched by a program.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

_PART = 8192  # ids; a multiple of the block
_BLOCK = 256  # quads of ids at a time


@triton.jit
def _gumbel(word: tl.tensor) -> tl.tensor:
    """Return -log(-log u) for u = (word + 1/2) 2^-32, float64."""
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _has_any(
    logits: tl.tensor,
    quads: tl.tensor,
    vocab_size: tl.tensor,
    threshold: tl.tensor,
    IS_FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return whether a logit of these quads of ids reaches the threshold; if unfiltered, without looking."""
    if not IS_FILTERED:
        return True
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for lane in tl.static_range(4):
        token_ids = quads * 4 + lane
        most = tl.maximum(most, tl.load(logits + token_ids, mask=token_ids < vocab_size, other=float("-inf")))
    return tl.max(most, axis=0) >= threshold


@triton.jit
def _draw_kernel(
    logits: tl.tensor,  # [L, V] float32
    max_logit: tl.tensor,  # [L] float32
    temperatures: tl.tensor,  # [L] float64; 0: the row is skipped
    seed_low: tl.tensor,  # [L] int64
    seed_high: tl.tensor,  # [L] int64
    output_indices: tl.tensor,  # [L] int64
    thresholds: tl.tensor,  # [L] float32, the lowest logit that may be drawn
    log_min_p: tl.tensor,  # [L] float64, the lowest log-probability allowed, relative to the largest
    scores: tl.tensor,  # [L, P] float64, out: the best of each part
    ids: tl.tensor,  # [L, P] int64, out: the lowest id that has it
    vocab_size: tl.tensor,  # V
    num_parts: tl.tensor,  # P
    IS_FILTERED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, peak = tl.load(temperatures + row), tl.load(max_logit + row).to(tl.float64)
    if (temperature > 0.0) & (tl.abs(peak) < float("inf")):
        key_low, key_high = tl.load(seed_low + row).to(tl.uint32), tl.load(seed_high + row).to(tl.uint32)
        output_index = tl.load(output_indices + row).to(tl.uint32)
        best = tl.full((BLOCK,), float("-inf"), tl.float64)
        best_id = tl.full((BLOCK,), 0, tl.int32) + part * PART
        threshold = tl.load(thresholds + row) if IS_FILTERED else float("-inf")
        least = tl.load(log_min_p + row) if IS_FILTERED else float("-inf")
        for start in range(0, PART // 4, BLOCK):
            quads = part * (PART // 4) + start + tl.arange(0, BLOCK)
            if _has_any(logits + row * vocab_size, quads, vocab_size, threshold, IS_FILTERED, BLOCK):
                zero = (quads * 0).to(tl.uint32)
                words = tl.philox_impl(quads.to(tl.uint32), zero + output_index, zero, zero, key_low, key_high)
                for lane in tl.static_range(4):
                    token_ids = quads * 4 + lane
                    is_id = token_ids < vocab_size
                    logit = tl.load(logits + row * vocab_size + token_ids, mask=is_id, other=float("-inf"))
                    relative = (logit.to(tl.float64) - peak) / temperature
                    score = relative + _gumbel(words[lane])
                    is_better = score > best
                    if IS_FILTERED:
                        is_better = is_better & (logit >= threshold) & (relative >= least)
                    best, best_id = tl.where(is_better, score, best), tl.where(is_better, token_ids, best_id)
        winner = tl.max(best, axis=0)
        tl.store(scores + row * num_parts + part, winner)
        tl.store(ids + row * num_parts + part, tl.min(tl.where(best == winner, best_id, vocab_size - 1), axis=0))


def draw(
    logits: Tensor,
    max_logit: Tensor,
    temperatures: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    output_indices: Tensor,
    thresholds: Tensor | None = None,
    log_min_p: Tensor | None = None,
) -> Tensor:
    """Draw from logits [L, V] float32 with maxima [L]; parameters are [L], float64 and int64. Returns ids [L] int64.

    With `thresholds` [L] float32 and `log_min_p` [L] float64, only among tokens that reach both. Ties go to the lowest
    id. Results are undefined for rows of temperature 0 or whose largest logit is not finite.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    scores = torch.zeros(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    ids = torch.zeros(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    if num_rows:
        _draw_kernel[num_rows, num_parts](
            logits.contiguous(),
            max_logit,
            temperatures,
            seed_low,
            seed_high,
            output_indices,
            max_logit if thresholds is None else thresholds,
            temperatures if log_min_p is None else log_min_p,
            scores,
            ids,
            vocab_size,
            num_parts,
            IS_FILTERED=thresholds is not None,
            PART=_PART,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    winners = scores.max(-1, keepdim=True).indices  # of ties, the first part, which has the lower ids
    return ids.gather(1, winners)[:, 0]
