"""From a layer's QKV projection to rotated queries and the KV cache, in one launch: head norms, rotation, write.

Legend: T = tokens, H = query heads, G = kv heads, E = head size, B = slots in a block, A = pairs of elements of a head
that are rotated.
"""

import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.row_ops import aligned

_LARGEST_E4M3 = tl.constexpr(448.0)
_ROWS = 16


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
def _heads_kernel(
    qkv: tl.tensor,  # [T, H + 2 * G, E]
    cos: tl.tensor | None,  # [T, HALF] float32; None: nothing is rotated
    sin: tl.tensor | None,  # [T, HALF] float32
    query_norm: tl.tensor | None,  # [E] float32; None: no norms
    key_norm: tl.tensor | None,  # [E] float32
    slots: tl.tensor,  # [T] int64; below 0: the token is not written
    query: tl.tensor,  # [T, H, E]
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    num_rows: tl.tensor,  # T * (H + 2 * G)
    eps: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """A row is one head of a token: query, key or value.

    A program loads the two rotated parts of its rows separately, HALF elements each, and the rest.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    token, heads = rows.to(tl.int64) // (H + 2 * G), rows % (H + 2 * G)
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


def rotate_and_write(
    qkv: Tensor,  # [T, (H + 2 * G) * E]
    rotary: tuple[Tensor, Tensor] | None,  # cos and sin, [T, A] float32; None: nothing is rotated
    norms: tuple[Tensor, Tensor, float] | None,  # of queries and keys, [E] float32 each, and their epsilon
    slots: Tensor,  # [T] int64; below 0: not written
    key_pool: Tensor,  # [num_slots, G, E], in the layout of `kv_place`
    value_pool: Tensor,  # [num_slots, G, E]
    num_heads: int,
    block_size: int,
) -> Tensor:  # [T, H, E]
    """Normalize and rotate queries and keys, store keys and values in their slots, return the queries.

    Element i of a head pairs with i + A; those from 2 * A on stay as they are.
    """
    qkv, (_, num_kv_heads, head_dim) = aligned(qkv), key_pool.shape
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    cos, sin = (None, None) if rotary is None else map(aligned, rotary)
    half = head_dim // 2 if cos is None else cos.shape[1]
    num_rows = len(qkv) * (num_heads + 2 * num_kv_heads)
    _heads_kernel[(triton.cdiv(num_rows, _ROWS),)](
        qkv,
        cos,
        sin,
        query_norm,
        key_norm,
        slots,
        query,
        key_pool,
        value_pool,
        num_rows,
        eps,
        H=num_heads,
        G=num_kv_heads,
        E=head_dim,
        B=block_size,
        ROWS=_ROWS,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return query
