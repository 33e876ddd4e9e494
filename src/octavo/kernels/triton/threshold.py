"""The lowest logit that top-k and top-p keep in a row, found by counting above cut points: nothing is sorted.

Logits have keys, integers in the same order. A pass cuts an interval of keys into 16 and sums up what lies above each
cut; eight passes narrow 2^32 keys to one. Top-k counts tokens, top-p their masses (`sampling/mass.py`): integer sums,
independent of order, so a row may be split over any number of programs.

Legend: L = rows, V = vocabulary size, W = ways to cut an interval, P = passes.
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
_STATE_SIZE = 4


@triton.jit
def key_of(logit: tl.tensor) -> tl.tensor:
    """Return int64 keys in the order of float32 numbers; both zeros have the same key."""
    bits = logit.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    """Return the float32 number of a key."""
    return tl.where(key < 0, -2147483648 - key, key).to(tl.int32).to(tl.float32, bitcast=True)


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
        threshold = _logit(high)
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
    states = logits.new_empty(_PASSES, num_rows, _STATE_SIZE, dtype=torch.int64)
    sums = torch.zeros(_PASSES, num_rows, _WAYS, dtype=torch.int64, device=logits.device)
    found, by_mass = torch.empty_like(floors), limits.is_floating_point()
    part = _part_size(num_rows, vocab_size)
    grid = num_rows, triton.cdiv(vocab_size, part)
    row_args = max_logit, temperatures, limits, floors
    logits = logits.contiguous()
    for last, at in pairwise((0, *range(_PASSES))):
        _measure_kernel[grid](
            logits,
            *row_args,
            states[last],
            sums[last],
            states[at],
            sums[at],
            vocab_size,
            off,
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
