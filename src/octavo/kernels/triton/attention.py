"""Causal attention over paged KV memory: one way of computing a row, and two ways of assigning rows to programs.

A row is one query head of one token. The context is divided at absolute positions into splits of `SPLIT_SIZE`
positions, and splits into tiles. A split's part is a weighted sum of values, the largest exponent, to which weights are
relative, and the sum of the weights, computed over its tiles in order (online softmax: Milakov and Gimelshein 2018,
arXiv:1805.02867); parts are joined in order (Flash-Decoding, Dao et al. 2023). Few rows get a program for each split
and a second launch that joins; many rows get one program that does everything. Masked positions add an exact zero, and
tiles have one height, so both ways are the same operations on the same numbers.

Legend: T = tokens, R = requests, H = query heads, G = kv heads, E = head size, B = slots in a block, N = items of
work, S = splits, M = tokens whose splits are joined by the second launch.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.heads import kv_place

SPLIT_SIZE = 256  # positions; a row's partial result is at most 1 % of the bytes read for a split


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Rows per program, a power of two from 16 on, and positions per tile: the same for all steps."""

    num_rows: int
    tile_size: int


# 64 rows fill an instruction of Hopper's tensor cores. Decoding wastes most of them: 64 operations per byte, of the 184
# that an H200 can do for each byte it reads.
TILING = Tiling(num_rows=64, tile_size=64)
TILING_FLOAT32 = Tiling(num_rows=32, tile_size=32)  # three TF32 products need more registers


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


@triton.jit
def _attention_kernel(
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
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """A program computes ROWS rows of one request and kv head, over one split of their context or all of it.

    Without items, every request has one token, and as many programs as its rows need.
    """
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
                WINDOW, G, E, B, ROWS, E_BLOCK, TILE,
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
                WINDOW, G, E, B, ROWS, E_BLOCK, TILE,
            )  # fmt: skip
            mixed, largest, total = join(mixed, largest, total, next_mixed, next_largest, next_total)
        if sinks is not None:
            mixed, total = join_sink(mixed, largest, total, tl.load(sinks + heads))
        tl.store(out + places, mean(mixed, total).to(rotated.dtype), mask=is_inside)


@triton.jit
def _join_kernel(
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
) -> None:
    """A program joins the splits of one row, in order."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedContext:
    """Locations of a step's contexts, and which of their positions are new."""

    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32; 0: padding, which gets zeros
    block_table: Tensor  # [R, row_size] int32
    block_size: int
    visible_ends: Tensor | None = None  # [T] int32, see `ForwardBatch.visible_ends`


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRows:
    """Work that is split: requests with few rows, at most one tile or one token."""

    items: Tensor | None  # [N, 3] int32: request, first row, number of its first token among M; None: see below
    tokens: Tensor | None  # [M, 2] int32: token, its request; None: every request has one token
    num_tokens: int  # M
    num_items: int  # N
    num_splits: int  # S, at least what the longest context needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax:
    """How products of queries and keys become weights: see `AttentionLayer`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [H] float32

    @property
    def exponent_scale(self) -> float:
        """The factor from the kernel's scores to exponents of 2."""
        return (self.scale if self.soft_cap is None else self.soft_cap) * math.log2(math.e)

    @property
    def score_scale(self) -> float | None:
        """The factor from scores to fractions of the soft cap, the argument of tanh."""
        return None if self.soft_cap is None else self.scale / self.soft_cap


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A step's work, assigned to programs."""

    few: FewRows | None
    many: Tensor | None  # [N, 3] int32: request, first row, unused


def attend(
    query: Tensor,  # [T, H, E]
    pools: tuple[Tensor, Tensor],  # keys, values: [num_slots, G, E], arranged as `kv_place` says; any float dtype
    context: PagedContext,
    work: Work,
    softmax: Softmax,
    tiling: Tiling,
) -> Tensor:  # [T, H, E]
    """Attend to the context: requests with few rows in two launches, those with many in one."""
    out, kv_heads = torch.empty_like(query), pools[0].shape[1]
    if work.few is not None:
        few, (_, num_heads, head_dim) = work.few, query.shape
        shape = few.num_tokens, num_heads, few.num_splits
        mixed = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        largest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
        grid = few.num_items, kv_heads, few.num_splits
        _launch(grid, query, pools, context, few.items, (None, mixed, largest, total), softmax, tiling, few.num_splits)
        _join_kernel[few.num_tokens, num_heads](
            *(mixed, largest, total, context.query_start_loc, context.seq_lens, few.tokens),
            *(softmax.sinks, context.visible_ends, out, few.num_splits),
            WINDOW=softmax.sliding_window or 0,
            H=num_heads,
            E=head_dim,
            E_BLOCK=_e_block(head_dim),
            SPLIT=SPLIT_SIZE,
            num_warps=1,
            enable_fp_fusion=False,
        )
    if work.many is not None:
        grid = len(work.many), kv_heads, 1
        _launch(grid, query, pools, context, work.many, (out, None, None, None), softmax, tiling, 1)
    return out


def _launch(
    grid: tuple[int, int, int],
    query: Tensor,  # [T, H, E]
    pools: tuple[Tensor, Tensor],  # [num_slots, G, E]
    context: PagedContext,
    items: Tensor | None,  # [N, 3]; None: see `FewRows.items`
    results: tuple[Tensor | None, ...],  # the output; or per split: weighted values, largest scores, sums
    softmax: Softmax,
    tiling: Tiling,
    num_splits: int,
) -> None:
    _, num_heads, head_dim = query.shape
    e_block = _e_block(head_dim)
    _attention_kernel[grid](
        *(query, *pools, context.query_start_loc, context.seq_lens, context.block_table, items, *results),
        *(softmax.sinks, context.visible_ends, context.block_table.stride(0), num_splits),
        *(softmax.exponent_scale, softmax.score_scale),
        WINDOW=softmax.sliding_window or 0,
        H=num_heads,
        G=pools[0].shape[1],
        E=head_dim,
        B=context.block_size,
        ROWS=tiling.num_rows,
        E_BLOCK=e_block,
        TILE=tiling.tile_size,
        SPLIT=SPLIT_SIZE,
        # 8 if a program's sums, with those of previous splits, would not fit into registers
        num_warps=8 if tiling.num_rows * e_block > 64 * 128 else 4,
        num_stages=2,
        enable_fp_fusion=False,
    )


def _e_block(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)  # the minimum for `tl.dot`
