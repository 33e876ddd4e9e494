"""From a layer's QKV projection to rotated queries and the KV cache, in one launch: head norms, rotation, write.

Legend: T = tokens, H = query heads, G = kv heads, E = head size, B = slots in a block.
"""

import torch
import triton
from triton import language as tl

from octavo.kernels.triton.arguments import aligned

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
def _heads_kernel(
    qkv: tl.tensor,  # [T, H + 2 * G, E]
    cos: tl.tensor,  # [T, E / 2] float32
    sin: tl.tensor,  # [T, E / 2] float32
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
    HALF_BLOCK: tl.constexpr,
) -> None:
    """A row is one head of a token: query, key or value. A program loads the two halves of its rows separately."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    token, heads = rows.to(tl.int64) // (H + 2 * G), rows % (H + 2 * G)
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    is_inside = (rows < num_rows) & (columns < E // 2)
    is_query, is_value = heads < H, heads >= H + G

    places = qkv + rows.to(tl.int64) * E + columns
    first = tl.load(places, mask=is_inside, other=0.0)
    second = tl.load(places + E // 2, mask=is_inside, other=0.0)
    dtype = first.dtype
    plain_first, plain_second = first.to(tl.float32), second.to(tl.float32)
    wide_first, wide_second = plain_first, plain_second
    if query_norm is not None:
        squares = wide_first * wide_first + wide_second * wide_second
        scale = tl.rsqrt(tl.sum(squares, axis=1) / E + eps)[:, None]
        factors = tl.where(is_query, query_norm + columns, key_norm + columns)
        # Rounded to the dtype between norm and rotation, as with two separate ops.
        wide_first = (wide_first * scale * tl.load(factors, mask=is_inside, other=0.0)).to(dtype).to(tl.float32)
        factors += E // 2
        wide_second = (wide_second * scale * tl.load(factors, mask=is_inside, other=0.0)).to(dtype).to(tl.float32)
    angles = token * (E // 2) + columns
    c = tl.load(cos + angles, mask=is_inside, other=0.0)
    s = tl.load(sin + angles, mask=is_inside, other=0.0)
    turned_first = tl.where(is_value, plain_first, wide_first * c - wide_second * s)
    turned_second = tl.where(is_value, plain_second, wide_second * c + wide_first * s)

    out = query + (token * H + heads) * E + columns
    tl.store(out, turned_first.to(dtype), mask=is_query & is_inside)
    tl.store(out + E // 2, turned_second.to(dtype), mask=is_query & is_inside)

    slot = tl.load(slots + token, mask=rows < num_rows, other=-1)
    kv_head = tl.where(is_value, heads - H - G, heads - H)
    place = kv_place(slot, kv_head, G, E, B) + columns
    out = tl.where(is_value, value_pool + place, key_pool + place)
    is_written = is_inside & (heads >= H) & (slot >= 0)
    stored: tl.constexpr = key_pool.dtype.element_ty
    # Through the dtype first: an 8-bit key is the quantized form of the key in full precision.
    tl.store(out, _stored(turned_first.to(dtype).to(tl.float32), stored), mask=is_written)
    tl.store(out + E // 2, _stored(turned_second.to(dtype).to(tl.float32), stored), mask=is_written)


def rotate_and_write(
    qkv: torch.Tensor,  # [T, (H + 2 * G) * E]
    cos: torch.Tensor,  # [T, E / 2] float32
    sin: torch.Tensor,  # [T, E / 2] float32
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,  # of queries and keys, [E] float32 each, and their epsilon
    slots: torch.Tensor,  # [T] int64; below 0: not written
    key_pool: torch.Tensor,  # [num_slots, G, E], in the layout of `kv_place`
    value_pool: torch.Tensor,  # [num_slots, G, E]
    num_heads: int,
    block_size: int,
) -> torch.Tensor:  # [T, H, E]
    """Normalize and rotate queries and keys, store keys and values in their slots, return the queries."""
    qkv, (_, num_kv_heads, head_dim) = aligned(qkv), key_pool.shape
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    num_rows = len(qkv) * (num_heads + 2 * num_kv_heads)
    _heads_kernel[(triton.cdiv(num_rows, _ROWS),)](
        qkv,
        aligned(cos),
        aligned(sin),
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
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return query
