"""Parts of attention: the result of rows over one span of their context, and how parts are joined.

A part is a weighted sum of values, the largest exponent, to which weights are relative, and the sum of the weights. It
is computed over a span's tiles in order (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867), and parts are
joined in order (Flash-Decoding, Dao et al. 2023).

Legend: E = head size, G = kv heads, B = slots in a block.
"""

import triton
from triton import language as tl

from octavo.kernels.triton.heads import kv_place


@triton.jit
def _shift(largest: tl.tensor) -> tl.tensor:
    """Return the value to subtract from exponents: the largest, or 0 if everything is masked."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def join(
    mixed: tl.tensor,  # [..., E] float32
    largest: tl.tensor,  # [...] float32, exponents of 2
    total: tl.tensor,  # [...] float32
    next_mixed: tl.tensor,
    next_largest: tl.tensor,
    next_total: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the next part to the previous ones. A fully masked part changes no bit."""
    new_largest = tl.maximum(largest, next_largest)
    shift = _shift(new_largest)
    weight, next_weight = tl.exp2(largest - shift), tl.exp2(next_largest - shift)
    mixed = mixed * tl.expand_dims(weight, -1) + next_mixed * tl.expand_dims(next_weight, -1)
    return mixed, new_largest, total * weight + next_total * next_weight


@triton.jit
def join_sink(
    mixed: tl.tensor,  # [..., E] float32
    largest: tl.tensor,  # [...] float32, exponents of 2
    total: tl.tensor,  # [...] float32
    sink: tl.tensor,  # [...] float32
) -> tuple[tl.tensor, tl.tensor]:
    """Add a score without a value: return the sums and totals including its weight."""
    exponent = sink * 1.4426950408889634  # log2(e)
    shift = _shift(tl.maximum(largest, exponent))
    weight = tl.exp2(largest - shift)
    return mixed * tl.expand_dims(weight, -1), total * weight + tl.exp2(exponent - shift)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh(x), to some 1e-7."""
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)  # e^-2|x|
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def attend_span(
    query: tl.tensor,  # [ROWS, E_BLOCK]
    positions: tl.tensor,  # [ROWS], of the rows' tokens; -1: no row
    lasts: tl.tensor,  # [ROWS], the last position that each sees; -1: no row
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    blocks: tl.tensor,  # the request's row of the block table
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    score_scale: tl.tensor | None,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to positions start ... stop - 1; return sums [ROWS, E_BLOCK], largest exponents, totals [ROWS]."""
    columns = tl.arange(0, E_BLOCK)[None, :]
    mixed = tl.zeros([ROWS, E_BLOCK], dtype=tl.float32)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(start, stop, TILE):
        at = first + tl.arange(0, TILE)
        block = tl.load(blocks + at // B, mask=at < stop, other=0).to(tl.int64)
        places = kv_place(block * B + at % B, kv_head, G, E, B)[:, None] + columns
        is_read = (at < stop)[:, None] & (columns < E)
        keys = tl.load(key_pool + places, mask=is_read, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")  # [ROWS, TILE]
        if score_scale is not None:
            scores = _tanh(scores * score_scale)
        is_seen = at[None, :] <= lasts[:, None]
        if WINDOW > 0:
            is_seen &= at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        shift = _shift(new_largest)
        # Explicit FMA: the compiler must not choose where to fuse (launches set `enable_fp_fusion=False`), as it could
        # choose differently in the other kind of program.
        weights = tl.fma(scores, scale, -shift[:, None])
        weights = tl.exp2(weights)
        fading = tl.exp2(largest - shift)
        total = tl.fma(total, fading, tl.sum(weights, axis=1))
        values = tl.load(value_pool + places, mask=is_read, other=0.0).to(query.dtype)
        mixed = tl.dot(weights.to(query.dtype), values, mixed * fading[:, None], input_precision="tf32x3")
        largest = new_largest
    return mixed, largest, total


@triton.jit
def mean(mixed: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the weighted mean; zeros if everything is masked, as in padding rows."""
    return mixed / tl.expand_dims(tl.where(total == 0.0, 1.0, total), -1)


@triton.jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the first position visible to a token."""
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0


@triton.jit
def last_seen(
    visible_ends: tl.tensor | None,  # [T] int32; None: a token sees nothing after itself
    token: tl.tensor,  # [...]
    position: tl.tensor,  # [...]; -1: no token
    is_token: tl.tensor,  # [...]
) -> tl.tensor:
    """Return the last position visible to a token; -1 for none."""
    # Not by an early return: the compiler also visits what follows one.
    last = position
    if visible_ends is not None:
        last = tl.load(visible_ends + token, mask=is_token, other=0) - 1
    return last
