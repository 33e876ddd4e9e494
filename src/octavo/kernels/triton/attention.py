"""The kernels of `attention/triton_paged.py`, which launches them: causal attention over paged KV memory.

First, from a layer's QKV projection to rotated queries and the KV cache: head norms, rotation, write. Then attention:
one way of computing a row, and two ways of assigning rows to programs.

A row is one query head of one token. The context is divided at absolute positions into splits, and splits into tiles. A
split's part is a weighted sum of values, the largest exponent, to which weights are relative, and the sum of the
weights, computed over its tiles in order (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867); parts are
joined in order (Flash-Decoding, Dao et al. 2023). Few rows get a program for each split and a second launch that joins;
many rows get one program that does everything. Masked positions add an exact zero, and if IS_EXACT, a tile's height
does not change the order of any sum: both ways are then the same operations on the same numbers.

Legend: T = tokens, R = requests, H = query heads, G = kv heads, E = head size, B = slots in a block, N = items of
work, S = splits, M = tokens whose splits are joined by the second launch, HALF = pairs of rotated elements of a head.
"""

import triton
from triton import language as tl

from octavo.kernels.triton.overlap import await_previous

_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def kv_place(slot: tl.tensor, head: tl.tensor, G: tl.constexpr, E: tl.constexpr, B: tl.constexpr) -> tl.tensor:
    """Return the offset of a slot's key or value of a head in its pool, whose layout is [blocks, G, B, E].

    The keys of a block and head, which one program reads, are thus contiguous.
    """
    return ((slot // B * G + head) * B + slot % B) * E


@triton.jit
def _stored(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to the pool's dtype. fp8 saturates at 448; only NaN becomes NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -_LARGEST_E4M3, _LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _normed(
    x: tl.tensor,  # [ROWS, some] float32
    scale: tl.tensor,  # [ROWS, 1]
    factors: tl.tensor,  # where those of x are
    is_inside: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Rounded to the dtype between norm and rotation, as where they are two ops."""
    return (x * scale * tl.load(factors, mask=is_inside, other=0.0)).to(dtype).to(tl.float32)


@triton.jit
def heads_kernel(  # noqa: PLR0915 - a kernel is one function
    qkv: tl.tensor,  # [T, WIDTH, E]: H + 2 * G, or H of a layer that reads another's keys and values
    cos: tl.tensor | None,  # [T, HALF] float32; None: nothing is rotated
    sin: tl.tensor | None,  # [T, HALF] float32
    query_norm: tl.tensor | None,  # [E] float32; None: no norms
    key_norm: tl.tensor | None,  # [E] float32
    slots: tl.tensor,  # [T] int64; below 0: the token is not written
    query: tl.tensor,  # [T, H, E]
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    num_rows: tl.tensor,  # T * WIDTH
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    NORMALIZES_VALUES: tl.constexpr,  # without weights
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A row is one head of a token: query, key or value.

    A program loads the two rotated parts of its rows separately, HALF elements each, and the rest.
    """
    await_previous(OVERLAPS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    token, heads = rows.to(tl.int64) // WIDTH, rows % WIDTH
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    is_inside = (rows < num_rows) & (columns < HALF)
    is_query, is_value = heads < H, heads >= H + G

    places = qkv + rows.to(tl.int64) * E
    first = tl.load(places + columns, mask=is_inside, other=0.0)
    second = tl.load(places + HALF + columns, mask=is_inside, other=0.0)
    dtype = first.dtype
    plain_first, plain_second = first.to(tl.float32), second.to(tl.float32)
    wide_first, wide_second = plain_first, plain_second
    if REST_BLOCK > 0:
        rest_columns = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = (rows < num_rows) & (rest_columns < E)
        plain_rest = tl.load(places + rest_columns, mask=is_rest, other=0.0).to(tl.float32)
        rest = plain_rest
    if query_norm is not None:
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / E + eps)[:, None]
        if NORMALIZES_VALUES:
            plain_first, plain_second = plain_first * scale, plain_second * scale
            if REST_BLOCK > 0:
                plain_rest = plain_rest * scale
        factors = tl.where(is_query, query_norm, key_norm)
        wide_first = _normed(wide_first, scale, factors + columns, is_inside, dtype)
        wide_second = _normed(wide_second, scale, factors + HALF + columns, is_inside, dtype)
        if REST_BLOCK > 0:
            rest = tl.where(is_value, plain_rest, _normed(rest, scale, factors + rest_columns, is_rest, dtype))
    turned_first, turned_second = wide_first, wide_second
    if cos is not None:
        angles = token * HALF + columns
        c = tl.load(cos + angles, mask=is_inside, other=0.0)
        s = tl.load(sin + angles, mask=is_inside, other=0.0)
        turned_first = wide_first * c - wide_second * s
        turned_second = wide_second * c + wide_first * s
    turned_first, turned_second = (
        tl.where(is_value, plain_first, turned_first),
        tl.where(is_value, plain_second, turned_second),
    )

    query_place = (token * H + heads) * E
    out = query + query_place + columns
    tl.store(out, turned_first.to(dtype), mask=is_query & is_inside)
    tl.store(out + HALF, turned_second.to(dtype), mask=is_query & is_inside)

    slot = tl.load(slots + token, mask=rows < num_rows, other=-1)
    kv_head = tl.where(is_value, heads - H - G, heads - H)
    place = kv_place(slot, kv_head, G, E, B)
    out = tl.where(is_value, value_pool + place, key_pool + place)
    is_kept = (heads >= H) & (slot >= 0)
    stored: tl.constexpr = key_pool.dtype.element_ty
    # Through the dtype first: an 8-bit key is the quantized form of the key in full precision.
    tl.store(out + columns, _stored(turned_first.to(dtype).to(tl.float32), stored), mask=is_kept & is_inside)
    tl.store(out + HALF + columns, _stored(turned_second.to(dtype).to(tl.float32), stored), mask=is_kept & is_inside)
    if REST_BLOCK > 0:
        tl.store(query + query_place + rest_columns, rest.to(dtype), mask=is_query & is_rest)
        tl.store(out + rest_columns, _stored(rest, stored), mask=is_kept & is_rest)


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
def _attend_tile(
    query: tl.tensor,  # [ROWS, E_BLOCK]
    positions: tl.tensor,
    lasts: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    blocks: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    score_scale: tl.tensor | None,
    mixed: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    IS_MASKED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add positions first ... first + TILE - 1 to the sums; see `attend_span`."""
    columns = tl.arange(0, E_BLOCK)[None, :]
    at = first + tl.arange(0, TILE)
    if IS_MASKED:
        block = tl.load(blocks + at // B, mask=at < stop, other=0).to(tl.int64)
    else:
        block = tl.load(blocks + at // B).to(tl.int64)
    places = kv_place(block * B + at % B, kv_head, G, E, B)[:, None] + columns
    if not IS_MASKED and E == E_BLOCK:
        keys = tl.load(key_pool + places).to(query.dtype)
    else:
        is_read = (at < stop)[:, None] & (columns < E)
        keys = tl.load(key_pool + places, mask=is_read, other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")  # [ROWS, TILE]
    if score_scale is not None:
        capped = scores * score_scale
        power = tl.exp2(tl.abs(capped) * -2.8853900817779268)  # e^-2|x|
        size = (1.0 - power) / (1.0 + power)  # tanh, to some 1e-7
        scores = tl.where(capped < 0.0, -size, size)
    if IS_MASKED:
        is_seen = at[None, :] <= lasts[:, None]
        if WINDOW > 0:
            is_seen &= at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    shift = _shift(new_largest)
    # Explicit FMA: the compiler must not choose where to fuse (launches set `enable_fp_fusion=False`), as it could
    # choose differently in the other kind of program.
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    fading = tl.exp2(largest - shift)
    rounded = weights.to(query.dtype)
    if IS_EXACT:  # products are summed in the same order whatever ROWS is, elements of a row are not
        ones = (tl.zeros((TILE, 16), tl.float32) + 1.0).to(query.dtype)
        added = tl.max(tl.dot(rounded, ones, input_precision="tf32x3"), axis=1)
    else:
        added = tl.sum(weights, axis=1)
    total = tl.fma(total, fading, added)
    if not IS_MASKED and E == E_BLOCK:
        values = tl.load(value_pool + places).to(query.dtype)
    else:
        is_read = (at < stop)[:, None] & (columns < E)
        values = tl.load(value_pool + places, mask=is_read, other=0.0).to(query.dtype)
    mixed = tl.dot(rounded, values, mixed * fading[:, None], input_precision="tf32x3")
    return mixed, new_largest, total


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
    IS_EXACT: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to positions start ... stop - 1; return sums [ROWS, E_BLOCK], largest exponents, totals [ROWS]."""
    mixed = tl.zeros([ROWS, E_BLOCK], dtype=tl.float32)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    # Tiles that every row sees whole need no masks. A window's first tiles would, too.
    free = start
    if WINDOW == 0:
        seen_by_all = tl.min(tl.where(positions < 0, stop, lasts + 1), axis=0)
        free += tl.maximum(tl.minimum(seen_by_all, stop) - start, 0) // TILE * TILE
    for first in range(start, free, TILE):
        mixed, largest, total = _attend_tile(
            query, positions, lasts, key_pool, value_pool, blocks, kv_head, first, stop, scale, score_scale,
            mixed, largest, total, False, IS_EXACT, WINDOW, G, E, B, E_BLOCK, TILE,
        )  # fmt: skip
    for first in range(free, stop, TILE):
        mixed, largest, total = _attend_tile(
            query, positions, lasts, key_pool, value_pool, blocks, kv_head, first, stop, scale, score_scale,
            mixed, largest, total, True, IS_EXACT, WINDOW, G, E, B, E_BLOCK, TILE,
        )  # fmt: skip
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


@triton.jit
def attention_kernel(
    query: tl.tensor,  # [T, H, E]
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    query_start_loc: tl.tensor,  # [R + 1] int32
    seq_lens: tl.tensor,  # [R] int32
    block_table: tl.tensor,  # [R, row_size] int32
    items: tl.tensor | None,  # [N, 3] int32: request, first row, number of its first token among M
    out: tl.tensor | None,  # [T, H, E]; None: parts are written to the next three
    part_mixed: tl.tensor | None,  # [M, H, S, E] float32
    part_largest: tl.tensor | None,  # [M, H, S] float32
    part_total: tl.tensor | None,  # [M, H, S] float32
    sinks: tl.tensor | None,  # [H] float32
    visible_ends: tl.tensor | None,  # [T] int32, one past the last position a token sees; None: its own
    row_size: tl.tensor,
    num_splits: tl.tensor,  # S
    scale: tl.tensor,  # of exponents of 2
    score_scale: tl.tensor | None,  # from scores to fractions of the soft cap; None: no cap
    IS_EXACT: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A program computes ROWS rows of one request and kv head, over one split of their context or all of it.

    Without items, every request has one token, and as many programs as its rows need.
    """
    await_previous(OVERLAPS)
    GROUP: tl.constexpr = H // G
    kv_head = tl.program_id(1)
    if items is None:
        PROGRAMS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
        request = tl.program_id(0) // PROGRAMS
        first_row = tl.program_id(0) % PROGRAMS * ROWS
        part = request
    else:
        request = tl.load(items + 3 * tl.program_id(0))
        first_row = tl.load(items + 3 * tl.program_id(0) + 1)
        part = tl.load(items + 3 * tl.program_id(0) + 2)
    start = tl.load(query_start_loc + request)
    num_tokens = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    first_position = seq_len - num_tokens

    rows = first_row + tl.arange(0, ROWS)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = tokens < num_tokens
    positions = tl.where(is_row, first_position + tokens, -1)
    lasts = last_seen(visible_ends, start + tokens, positions, is_row)
    columns = tl.arange(0, E_BLOCK)[None, :]
    is_inside = is_row[:, None] & (columns < E)
    places = (((start + tokens).to(tl.int64) * H + heads) * E)[:, None] + columns
    rotated = tl.load(query + places, mask=is_inside, other=0.0)

    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    stop = last_seen(visible_ends, start + last_token, first_position + last_token, last_token >= 0) + 1
    begin = first_seen(first_position + first_row // GROUP, WINDOW) // TILE * TILE
    blocks = block_table + request.to(tl.int64) * row_size
    if out is None:
        split = tl.program_id(2)
        begin, stop = tl.maximum(begin, split * SPLIT), tl.minimum(stop, (split + 1) * SPLIT)
        if begin < stop:
            mixed, largest, total = attend_span(
                rotated, positions, lasts, key_pool, value_pool, blocks, kv_head, begin, stop, scale, score_scale,
                IS_EXACT, WINDOW, G, E, B, ROWS, E_BLOCK, TILE,
            )  # fmt: skip
            parts = ((part + tokens).to(tl.int64) * H + heads) * num_splits + split
            tl.store(part_largest + parts, largest, mask=is_row)
            tl.store(part_total + parts, total, mask=is_row)
            tl.store(part_mixed + parts[:, None] * E + columns, mixed, mask=is_inside)
    else:
        mixed = tl.zeros([ROWS, E_BLOCK], dtype=tl.float32)
        largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        for split_start in range(begin // SPLIT * SPLIT, stop, SPLIT):
            next_mixed, next_largest, next_total = attend_span(
                rotated, positions, lasts, key_pool, value_pool, blocks, kv_head,
                tl.maximum(begin, split_start), tl.minimum(stop, split_start + SPLIT), scale, score_scale,
                IS_EXACT, WINDOW, G, E, B, ROWS, E_BLOCK, TILE,
            )  # fmt: skip
            mixed, largest, total = join(mixed, largest, total, next_mixed, next_largest, next_total)
        if sinks is not None:
            mixed, total = join_sink(mixed, largest, total, tl.load(sinks + heads))
        tl.store(out + places, mean(mixed, total).to(rotated.dtype), mask=is_inside)


@triton.jit
def join_kernel(
    part_mixed: tl.tensor,  # [M, H, S, E] float32
    part_largest: tl.tensor,  # [M, H, S] float32
    part_total: tl.tensor,  # [M, H, S] float32
    query_start_loc: tl.tensor,  # [R + 1] int32
    seq_lens: tl.tensor,  # [R] int32
    tokens: tl.tensor | None,  # [M, 2] int32: token, its request; None: token m is of request m
    sinks: tl.tensor | None,  # [H] float32
    visible_ends: tl.tensor | None,  # [T] int32
    out: tl.tensor,  # [T, H, E]
    num_splits: tl.tensor,  # S
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A program joins the splits of one row, in order."""
    await_previous(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    request = token
    part = (tl.program_id(0).to(tl.int64) * H + head) * num_splits
    if tokens is not None:
        token, request = tl.load(tokens + 2 * token), tl.load(tokens + 2 * token + 1)
    num_left = tl.load(query_start_loc + request + 1) - token  # tokens of the request from this one on
    position = tl.load(seq_lens + request) - num_left
    last = last_seen(visible_ends, token, position, num_left > 0)
    columns = tl.arange(0, E_BLOCK)
    mixed = tl.zeros([E_BLOCK], dtype=tl.float32)
    largest = tl.max(mixed, axis=0) + float("-inf")
    total = tl.max(mixed, axis=0)
    for split in range(first_seen(position, WINDOW) // SPLIT, (last + SPLIT) // SPLIT):
        next_mixed = tl.load(part_mixed + (part + split) * E + columns, mask=columns < E, other=0.0)
        next_largest, next_total = tl.load(part_largest + part + split), tl.load(part_total + part + split)
        mixed, largest, total = join(mixed, largest, total, next_mixed, next_largest, next_total)
    if sinks is not None:
        mixed, total = join_sink(mixed, largest, total, tl.load(sinks + head))
    place = (token.to(tl.int64) * H + head) * E + columns
    tl.store(out + place, mean(mixed, total).to(out.dtype.element_ty), mask=columns < E)
