"""Sampling: the argmax of log p + Gumbel noise per row of logits, among what top-k and top-p keep.

Thresholds are found by counting above cut points: nothing is sorted. Logits have keys, integers in the same order. A
pass cuts an interval of keys into 16 and sums up what lies above each cut; eight passes narrow 2^32 keys to one. Top-k
counts tokens, top-p their masses (`sampling/filters.py`): integer sums, independent of order, so a row may be split
over any number of programs.

Drawing is one pass that never stores the noise; a block with no logit above the threshold computes none. Philox4x32-10
(Salmon et al., SC 2011) yields four words for four neighbors: counter (id >> 2, output index, 0, 0), word id & 3.
Scores are float64, computed by the same operations in the same order as in `sampling/noise.py`, `sampling/filters.py`;
only the two logarithms are the device's, the same ones that torch calls on a GPU.

Legend: L = rows, V = vocabulary size, W = ways to cut an interval, P = parts of a row, each searched by a program.
"""

from itertools import pairwise

import torch
import triton
from torch import Tensor
from triton import language as tl

_WAYS, _PASSES = 16, 8  # 16 ** 8 = 2 ** 32
_BLOCK, _WARPS = 256, 8  # ids at a time, one per thread: 16 sums each are in registers
_FEWEST_IDS, _MAX_IDS = 1024, 16384  # per program
_PROGRAMS = 1024  # enough to fill a GPU
_DRAWN_PART = 8192  # ids per program that draws; a multiple of the block
_QUADS = 256  # of ids at a time


@triton.jit
def key_of(logit: tl.tensor) -> tl.tensor:
    """Return int64 keys in the order of float32 numbers; both zeros have the same key."""
    bits = logit.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def _narrowed(
    state: tl.tensor, sums: tl.tensor, limit: tl.tensor, ways: tl.tensor, BY_MASS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return a pass's result: the smallest key with less than the goal above it is in low + 1 ... high.

    Also the amount above high, and the goal, which for masses is a fraction of the total found in the first pass.
    """
    low, high, above, goal = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    cuts = low + (high - low) * ways // 16
    weights = above + tl.load(sums + ways)
    if BY_MASS:
        total = tl.max(weights, axis=0)  # above the first cut, which is low
        goal = tl.where(goal == 0, tl.ceil(limit * total.to(tl.float64)).to(tl.int64), goal)
    num_low = tl.maximum(tl.sum((weights >= goal).to(tl.int32), axis=0), 1)
    high = tl.min(tl.where(ways == num_low, cuts, high), axis=0)
    above = tl.sum(tl.where(ways == num_low, weights, 0), axis=0) + tl.where(num_low == 16, above, 0)
    return tl.max(tl.where(ways == num_low - 1, cuts, -4294967296), axis=0), high, above, goal


@triton.jit
def _is_limited(temperature: tl.tensor, limit: tl.tensor, peak: tl.tensor, off: tl.tensor) -> tl.tensor:
    """Return whether there is anything to find. A row whose largest logit is not finite is skipped."""
    return (temperature > 0.0) & (limit < off) & (tl.abs(peak) < float("inf"))


@triton.jit
def _measure_kernel(
    logits: tl.tensor,  # [L, V] float32
    max_logit: tl.tensor,  # [L] float32
    temperatures: tl.tensor,  # [L] float64; 0: the row is skipped
    limits: tl.tensor,  # [L] int64 tokens, or float64 fraction of the mass; `off` and more: no limit
    floors: tl.tensor,  # [L] float32, the lowest logit that counts
    last_states: tl.tensor,  # [L, 4] int64: low, high, amount above high, goal; before the last pass
    last_sums: tl.tensor,  # [L, W] int64, found by the last pass
    states: tl.tensor,  # [L, 4] int64, out
    sums: tl.tensor,  # [L, W] int64, zeros at first, out: of keys above each cut, up to high
    vocab_size: tl.tensor,  # V
    off: tl.tensor,
    IS_FIRST: tl.constexpr,
    BY_MASS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part, ways = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 16)
    temperature, limit, peak = tl.load(temperatures + row), tl.load(limits + row), tl.load(max_logit + row)
    if _is_limited(temperature, limit, peak, off):
        if IS_FIRST:
            low, high = key_of(tl.load(floors + row)) - 1, key_of(peak)
            above, goal = low * 0, low * 0
            if not BY_MASS:
                goal += limit
        else:
            low, high, above, goal = _narrowed(
                last_states + row * 4, last_sums + row * 16, limit, ways, BY_MASS=BY_MASS
            )
        if part == 0:
            tl.store(states + row * 4, low)
            tl.store(states + row * 4 + 1, high)
            tl.store(states + row * 4 + 2, above)
            tl.store(states + row * 4 + 3, goal)
        cuts = low + (high - low) * ways // 16
        found = tl.zeros([BLOCK, 16], dtype=tl.int64)
        for start in range(0, PART, BLOCK):
            ids = part * PART + start + tl.arange(0, BLOCK)
            logit = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
            keys = key_of(logit)
            is_inside = (ids < vocab_size) & (keys > low) & (keys <= high)
            if tl.max(is_inside.to(tl.int32), axis=0) > 0:
                if BY_MASS:
                    relative = (logit.to(tl.float64) - peak.to(tl.float64)) / temperature
                    weight = (tl.exp(relative) * 17592186044416.0).to(tl.int64)
                else:
                    weight = is_inside.to(tl.int64)
                is_above = is_inside[:, None] & (keys[:, None] > cuts[None, :])
                found += tl.where(is_above, weight[:, None], 0)
        tl.atomic_add(sums + row * 16 + ways, tl.sum(found, axis=0), sem="relaxed")


@triton.jit
def _threshold_kernel(
    max_logit: tl.tensor,  # [L] float32
    temperatures: tl.tensor,  # [L] float64
    limits: tl.tensor,  # [L]
    floors: tl.tensor,  # [L] float32
    states: tl.tensor,  # [L, 4] int64 of the last pass
    sums: tl.tensor,  # [L, W] int64 of the last pass
    thresholds: tl.tensor,  # [L] float32, out
    off: tl.tensor,
    BY_MASS: tl.constexpr,
) -> None:
    row, ways = tl.program_id(0).to(tl.int64), tl.arange(0, 16)
    limit, threshold = tl.load(limits + row), tl.load(floors + row)
    if _is_limited(tl.load(temperatures + row), limit, tl.load(max_logit + row), off):
        _, high, _, _ = _narrowed(states + row * 4, sums + row * 16, limit, ways, BY_MASS=BY_MASS)
        bits = tl.where(high < 0, -2147483648 - high, high).to(tl.int32)  # the inverse of `key_of`
        threshold = bits.to(tl.float32, bitcast=True)
    tl.store(thresholds + row, threshold)


def thresholds(logits: Tensor, max_logit: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest logit of each row that top-k and top-p keep, [L] float32; -inf if they keep all.

    logits are [L, V] float32, with maxima [L]; temperatures and top_p [L] float64, top_k [L] int64: V or more is off,
    as is 1 for top-p, which applies to what top-k keeps. Rows of temperature 0 get -inf.
    """
    floors = torch.full_like(max_logit, -torch.inf)
    floors = _least(logits, max_logit, temperatures, top_k, floors, logits.shape[1])
    return _least(logits, max_logit, temperatures, top_p, floors, 1)


def _least(logits: Tensor, max_logit: Tensor, temperatures: Tensor, limits: Tensor, floors: Tensor, off: int) -> Tensor:
    """Return the lowest logit with less than a limit above it, among those not below the floors: [L] float32."""
    num_rows, vocab_size = logits.shape
    states = logits.new_empty(_PASSES, num_rows, 4, dtype=torch.int64)
    sums = torch.zeros(_PASSES, num_rows, _WAYS, dtype=torch.int64, device=logits.device)
    found, by_mass = torch.empty_like(floors), limits.is_floating_point()
    part = _part_size(num_rows, vocab_size)
    grid = num_rows, triton.cdiv(vocab_size, part)
    row_args = max_logit, temperatures, limits, floors
    logits = logits.contiguous()
    for last, at in pairwise((0, *range(_PASSES))):
        _measure_kernel[grid](
            *(logits, *row_args, states[last], sums[last], states[at], sums[at], vocab_size, off),
            IS_FIRST=at == 0,
            BY_MASS=by_mass,
            PART=part,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    _threshold_kernel[(num_rows,)](*row_args, states[-1], sums[-1], found, off, BY_MASS=by_mass, enable_fp_fusion=False)
    return found


def _part_size(num_rows: int, vocab_size: int) -> int:
    """Return how many ids a program scans: few if there are few rows, so that all of the GPU has work."""
    wanted = num_rows * vocab_size // _PROGRAMS
    return max(_FEWEST_IDS, min(_MAX_IDS, int(triton.next_power_of_2(max(1, wanted)))))


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
                    # Noise is -log(-log u) for u = (word + 1/2) 2^-32.
                    uniform = (words[lane].to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
                    score = relative + -tl.log(-tl.log(uniform))
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
    num_parts = triton.cdiv(vocab_size, _DRAWN_PART)
    scores = torch.zeros(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    ids = torch.zeros(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    if num_rows:
        least = max_logit if thresholds is None else thresholds  # placeholders, never read
        least_p = temperatures if log_min_p is None else log_min_p
        _draw_kernel[num_rows, num_parts](
            *(logits.contiguous(), max_logit, temperatures, seed_low, seed_high, output_indices),
            *(least, least_p, scores, ids, vocab_size, num_parts),
            IS_FILTERED=thresholds is not None,
            PART=_DRAWN_PART,
            BLOCK=_QUADS,
            enable_fp_fusion=False,
        )
    winners = scores.max(-1, keepdim=True).indices  # of ties, the first part, which has the lower ids
    return ids.gather(1, winners)[:, 0]
