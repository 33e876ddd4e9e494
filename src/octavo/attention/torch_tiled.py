"""Row-invariant attention in plain torch: a token's result has the same bits in any batch and any chunking.

Three things make it so. The context is cut into tiles at absolute positions, whatever the block size, and tiles are
summed in order; a tile that a row may not see adds an exact zero. Rows are padded to at least 16, from where on torch's
batched matmul gives a row the same bits for any number of rows (measured: below 8 it does not). And exp, which torch
computes alike at the ends of an array and in its middle, is the only transcendental function (sigmoid and silu differ).

Legend: T = tokens of the step, R = requests of a group, Q = new tokens of each, H = query heads, G = kv heads,
M = query rows of one kv head, D = head size, N = context tiles, W = tile width.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.attention.paged import context_slots, write_kv

_TILE_WIDTH = 64  # context positions; at ends of sums and matmuls, so part of what the bits are
_MIN_ROWS = 16
_MAX_ROWS = 128  # query rows of one kv head at a time; bounds the scores held


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestGroup:
    """Requests with as many new tokens and (nearly) as many tiles, computed together."""

    tokens: torch.Tensor  # [R, Q] int64, rows of the flat [T]
    positions: torch.Tensor  # [R, Q] int64, in the context
    slots: torch.Tensor  # [R, N * W] int64


class TiledAttention:
    """See `AttentionBackend`. Any dtype; the arithmetic is float32."""

    name = "torch-tiled"
    is_row_invariant = True

    def plan(self, batch: ForwardBatch) -> list[RequestGroup]:
        """Group the step's requests: decodes of similar context together, prompts of equal shape together."""
        starts = batch.query_start_loc_list

        def shape_of(request: int) -> tuple[int, int]:
            return starts[request + 1] - starts[request], _rounded_tiles(batch.seq_lens_list[request])

        ordered = sorted(range(len(batch.seq_lens_list)), key=shape_of)
        return [
            _make_group(batch, list(requests), num_queries, num_tiles)
            for (num_queries, num_tiles), requests in groupby(ordered, key=shape_of)
        ]

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        plan: list[RequestGroup],
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:  # [T, H, D]
        write_kv(key, value, kv_cache, batch.slot_mapping)
        out = torch.empty_like(query)
        num_tokens = max(1, _MAX_ROWS * key.shape[1] // query.shape[1])  # per pass and request
        for group in plan:
            keys, values = (_gather_tiles(pool, group.slots) for pool in (kv_cache.key, kv_cache.value))
            for tokens, positions in zip(
                torch.split(group.tokens, num_tokens, dim=1),
                torch.split(group.positions, num_tokens, dim=1),
                strict=True,
            ):
                rows = query[tokens].float() * scale  # [R, Q, H, D]
                out[tokens] = _attend(rows, positions, keys, values, sliding_window).to(out.dtype)
        return out


def _rounded_tiles(seq_len: int) -> int:
    """Return the tiles that hold a context, rounded up in steps of an eighth to a quarter, so that requests group."""
    num_tiles = -(-seq_len // _TILE_WIDTH)
    step = 1 << max(0, num_tiles.bit_length() - 3)
    return -(-num_tiles // step) * step


def _make_group(batch: ForwardBatch, requests: list[int], num_queries: int, num_tiles: int) -> RequestGroup:
    device = batch.positions.device
    first = torch.tensor([batch.query_start_loc_list[request] for request in requests], device=device)  # [R]
    tokens = first.unsqueeze(1) + torch.arange(num_queries, device=device)  # [R, Q]
    return RequestGroup(
        tokens=tokens,
        positions=batch.positions[tokens],
        slots=context_slots(batch, torch.tensor(requests, device=device), num_tiles * _TILE_WIDTH),
    )


def _gather_tiles(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return [R, G, N, W, D] float32 from pool [num_slots, G, D]."""
    gathered = pool.index_select(0, slots.flatten()).float()  # [R * N * W, G, D]
    tiles = gathered.view(slots.shape[0], -1, _TILE_WIDTH, *pool.shape[1:])  # [R, N, W, G, D]
    return tiles.permute(0, 3, 1, 2, 4).contiguous()


def _attend(
    query: torch.Tensor,  # [R, Q, H, D] float32, scaled
    positions: torch.Tensor,  # [R, Q]
    keys: torch.Tensor,  # [R, G, N, W, D]
    values: torch.Tensor,  # [R, G, N, W, D]
    sliding_window: int | None,
) -> torch.Tensor:  # [R, Q, H, D]
    num_requests, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_tiles = keys.shape[1:3]
    rows = query.view(num_requests, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    group_size, num_rows = num_heads // num_kv_heads, rows.shape[2]
    rows = F.pad(rows, (0, 0, 0, -num_rows % _MIN_ROWS))  # [R, G, M, D]
    row_positions = F.pad(positions.repeat_interleave(group_size, dim=1), (0, rows.shape[2] - num_rows))  # [R, M]

    scores = _batched_matmul(rows.unsqueeze(2), keys.transpose(3, 4))  # [R, G, N, M, W]
    scores.masked_fill_(_hidden(row_positions, num_tiles, sliding_window).unsqueeze(1), -torch.inf)
    scores -= scores.amax(dim=(2, 4), keepdim=True)
    weights = scores.exp_()  # [R, G, N, M, W]; hidden ones are exact zeros
    mixed = _sum_in_order(_batched_matmul(weights, values))  # [R, G, M, D]
    result = mixed / _sum_in_order(weights.sum(-1, keepdim=True))
    result = result[:, :, :num_rows].reshape(num_requests, num_kv_heads, num_queries, group_size, head_dim)
    return result.transpose(1, 2).flatten(2, 3)


def _batched_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [R, G, N or 1, M, K] by [R, G, N, K, W] as one batch of equal matmuls."""
    left = left.expand(*right.shape[:3], *left.shape[3:]).flatten(0, 2)
    return torch.bmm(left, right.flatten(0, 2)).view(*right.shape[:3], *left.shape[1:2], *right.shape[4:])


def _hidden(positions: torch.Tensor, num_tiles: int, sliding_window: int | None) -> torch.Tensor:
    """Say what each row may not see: [R, N, M, W] bool from row positions [R, M]."""
    keys = torch.arange(num_tiles * _TILE_WIDTH, device=positions.device).view(1, num_tiles, 1, _TILE_WIDTH)
    queries = positions[:, None, :, None]  # [R, 1, M, 1]
    hidden = keys > queries
    if sliding_window is not None:
        hidden |= keys <= queries - sliding_window
    return hidden


def _sum_in_order(tiles: torch.Tensor) -> torch.Tensor:
    """Add [R, G, N, M, D] over N from the first tile to the last: zeros before or after change no bit."""
    total = tiles[:, :, 0].clone()
    for tile in tiles.unbind(2)[1:]:
        total += tile
    return total
