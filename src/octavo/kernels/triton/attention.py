"""Causal attention over paged KV memory: one way of computing a row, and two ways of assigning rows to programs.

A row is one query head of one token. The context is divided at absolute positions into splits of `SPLIT_SIZE`
positions, and splits into tiles; `attention_parts.py` sums splits and joins them. Few rows get a program for each split
and a second launch that joins; many rows get one program that does everything. Masked positions add an exact zero, so
with equal tile heights (`Tiling.is_same_for_all`) both ways are the same operations on the same numbers.

Legend: T = tokens, R = requests, H = query heads, G = kv heads, E = head size, B = slots in a block, N = items of
work, S = splits, M = tokens whose splits are joined by the second launch.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.attention_parts import attend_span, first_seen, join, join_sink, last_seen, mean

SPLIT_SIZE = 256  # positions; a row's partial result is at most 1 % of the bytes read for a split


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Rows per program of each kind, powers of two from 16 on, and positions per tile."""

    few_rows: int
    many_rows: int
    tile_size: int

    @property
    def is_same_for_all(self) -> bool:
        """Whether both ways give a token the same bits; then both compute splits separately."""
        return self.few_rows == self.many_rows


# 64 rows fill an instruction of Hopper's tensor cores. Decoding wastes most of them: 64 operations per byte, of the 184
# that an H200 can do for each byte it reads.
EXACT = Tiling(few_rows=64, many_rows=64, tile_size=64)
FASTEST = Tiling(few_rows=16, many_rows=128, tile_size=64)
EXACT_FLOAT32 = Tiling(few_rows=32, many_rows=32, tile_size=32)  # three TF32 products need more registers


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
    KEEPS_SPLITS: tl.constexpr,
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
        if KEEPS_SPLITS:
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
        else:
            mixed, largest, total = attend_span(
                rotated, positions, lasts, key_pool, value_pool, blocks, kv_head, begin, stop, scale, score_scale,
                WINDOW, G, E, B, ROWS, E_BLOCK, TILE,
            )  # fmt: skip
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


def attend_few(
    query: Tensor,  # [T, H, E]
    key_pool: Tensor,  # [num_slots, G, E], arranged as `heads.kv_place` says; any float dtype
    value_pool: Tensor,  # [num_slots, G, E]
    context: PagedContext,
    work: FewRows,
    out: Tensor,  # [T, H, E], written at the work's tokens
    softmax: Softmax,
    tiling: Tiling,
) -> None:
    """Attention of few rows per request: a program for each split, and a launch that joins."""
    _, num_heads, head_dim = query.shape
    shape = work.num_tokens, num_heads, work.num_splits
    mixed = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    largest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
    _launch(
        (work.num_items, key_pool.shape[1], work.num_splits),
        query,
        key_pool,
        value_pool,
        context,
        work.items,
        (None, mixed, largest, total),
        softmax,
        tile_size=tiling.tile_size,
        num_rows=tiling.few_rows,
        num_splits=work.num_splits,
        keeps_splits=False,
    )
    _join_kernel[work.num_tokens, num_heads](
        mixed,
        largest,
        total,
        context.query_start_loc,
        context.seq_lens,
        work.tokens,
        softmax.sinks,
        context.visible_ends,
        out,
        work.num_splits,
        WINDOW=softmax.sliding_window or 0,
        H=num_heads,
        E=head_dim,
        E_BLOCK=_e_block(head_dim),
        SPLIT=SPLIT_SIZE,
        num_warps=1,
        enable_fp_fusion=False,
    )


def attend_many(
    query: Tensor,  # [T, H, E]
    key_pool: Tensor,  # [num_slots, G, E], arranged as `heads.kv_place` says; any float dtype
    value_pool: Tensor,  # [num_slots, G, E]
    context: PagedContext,
    items: Tensor,  # [N, 3] int32: request, first row, unused
    out: Tensor,  # [T, H, E], written at the items' tokens
    softmax: Softmax,
    tiling: Tiling,
) -> None:
    """Attention of many rows: a program loops over all of its rows' context."""
    _launch(
        (len(items), key_pool.shape[1]),
        query,
        key_pool,
        value_pool,
        context,
        items,
        (out, None, None, None),
        softmax,
        tile_size=tiling.tile_size,
        num_rows=tiling.many_rows,
        num_splits=1,
        keeps_splits=tiling.is_same_for_all,
    )


def _launch(
    grid: tuple[int, ...],
    query: Tensor,  # [T, H, E]
    key_pool: Tensor,  # [num_slots, G, E]
    value_pool: Tensor,  # [num_slots, G, E]
    context: PagedContext,
    items: Tensor | None,  # [N, 3]; None: see `FewRows.items`
    results: tuple[Tensor | None, ...],  # the output; or per split: weighted values, largest scores, sums
    softmax: Softmax,
    *,
    tile_size: int,
    num_rows: int,  # of a program
    num_splits: int,
    keeps_splits: bool,
) -> None:
    _, num_heads, head_dim = query.shape
    e_block = _e_block(head_dim)
    _attention_kernel[grid](
        query,
        key_pool,
        value_pool,
        context.query_start_loc,
        context.seq_lens,
        context.block_table,
        items,
        *results,
        softmax.sinks,
        context.visible_ends,
        context.block_table.stride(0),
        num_splits,
        softmax.exponent_scale,
        softmax.score_scale,
        WINDOW=softmax.sliding_window or 0,
        H=num_heads,
        G=key_pool.shape[1],
        E=head_dim,
        B=context.block_size,
        ROWS=num_rows,
        E_BLOCK=e_block,
        TILE=tile_size,
        SPLIT=SPLIT_SIZE,
        KEEPS_SPLITS=keeps_splits,
        num_warps=_num_warps(num_rows, e_block),
        num_stages=2,
        enable_fp_fusion=False,
    )


def _e_block(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)  # the minimum for `tl.dot`


def _num_warps(num_rows: int, e_block: int) -> int:
    """Return 4, or 8 if a program's sums, with those of previous splits, would not fit into registers."""
    return 8 if num_rows * e_block > 64 * 128 else 4
