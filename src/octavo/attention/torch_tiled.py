"""Batch-invariant attention in plain torch: a token's result has the same bits in any batch and any chunking.

For three reasons. The context is cut into tiles at absolute positions, whatever the block size, and tiles are summed in
order; a masked tile adds an exact zero. All matmuls have the same shape, 16 rows by one tile, and only their number
varies, which is at least 2: MKL gave other bits for other numbers of rows, or for a single matmul (measured on its
AVX-512, AVX2 and SSE4.2 code with 1 to 3 threads). And exp is the only transcendental function: torch computes it alike
in the middle of an array and at its ends, unlike sigmoid and silu.

Legend: T = tokens of the step, R = requests of a group, Q = new tokens of each, H = query heads, G = kv heads,
D = head size, N = context tiles, W = tile width, S = sets of 16 query rows.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.base import AttentionLayer, TorchAttention, context_slots
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.kernels.reference import hyperbolic_tangent

_TILE_WIDTH = 64  # context positions
_MAX_POSITIONS = 1 << 14  # per group; limits gathered memory to 128 MiB with 8 kv heads of 128
_NUM_ROWS = 16  # query rows of one matmul: all query heads of one kv head, of one or more tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestGroup:
    """Requests with equally many new tokens and about as many tiles, computed together."""

    tokens: Tensor  # [R, Q] int64, rows of the flat [T]
    positions: Tensor  # [R, Q] int64, in the context
    slots: Tensor  # [R, N * W] int64
    first_position: int  # least of positions[:, 0]
    last_position: int  # greatest of positions[:, 0]
    ends: Tensor | None  # [R, Q] int64, see `ForwardBatch.visible_ends`

    def tiles_seen(self, tokens: range, sliding_window: int | None) -> slice:
        """Return the tiles that cover every position visible to these tokens."""
        first = 0 if sliding_window is None else max(0, self.first_position + tokens.start - sliding_window + 1)
        last = self.last_position + tokens.stop - 1 if self.ends is None else self.slots.shape[1] - 1
        return slice(first // _TILE_WIDTH, last // _TILE_WIDTH + 1)


class TiledAttention(TorchAttention[list[RequestGroup]]):
    """Any dtype; the arithmetic is float32."""

    name = "torch-tiled"
    is_batch_invariant = True
    features = frozenset({"soft_cap", "sinks", "value_norm", "kv_sharing", "latent", "chunks"})

    def plan(self, batch: ForwardBatch) -> list[RequestGroup]:
        """Group the step's requests by number of new tokens and context length."""
        starts = batch.query_start_loc_list

        def shape_of(request: int) -> tuple[int, int]:
            return starts[request + 1] - starts[request], _rounded_tiles(batch.seq_lens_list[request])

        groups: list[RequestGroup] = []
        for shape, alike in groupby(sorted(range(len(batch.seq_lens_list)), key=shape_of), key=shape_of):
            num_queries, num_tiles = shape
            requests, size = list(alike), max(1, _MAX_POSITIONS // (num_tiles * _TILE_WIDTH))
            groups += [
                _make_group(batch, requests[first : first + size], num_queries, num_tiles)
                for first in range(0, len(requests), size)
            ]
        return groups

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        plan: list[RequestGroup] = step.plans[layer.kv_group]
        out = query.new_empty(*query.shape[:2], kv_cache.value.shape[2])
        tokens_per_pass = max(1, _NUM_ROWS * layer.num_kv_heads // layer.num_heads)
        for group in plan:
            keys, values = (_gather_tiles(pool, group.slots) for pool in (kv_cache.key, kv_cache.value))
            for start in range(0, group.tokens.shape[1], tokens_per_pass):
                part = range(start, min(start + tokens_per_pass, group.tokens.shape[1]))
                tokens, positions = (rows[:, part.start : part.stop] for rows in (group.tokens, group.positions))
                tiles = group.tiles_seen(part, layer.sliding_window)
                ends = None if group.ends is None else group.ends[:, part.start : part.stop]
                hidden = _hidden(positions, ends, tiles, layer)  # [R, N, Q, W]
                rows = query[tokens].float() * layer.softmax_scale  # [R, Q, H, D]
                out[tokens] = _attend(rows, keys[:, :, tiles], values[:, :, tiles], hidden, layer).to(out.dtype)
        return out.flatten(1)


def _rounded_tiles(seq_len: int) -> int:
    """Return the number of tiles of a context, rounded up in steps of an eighth to a quarter, to form larger groups."""
    num_tiles = -(-seq_len // _TILE_WIDTH)
    step = 1 << max(0, num_tiles.bit_length() - 3)
    return -(-num_tiles // step) * step


def _make_group(batch: ForwardBatch, requests: list[int], num_queries: int, num_tiles: int) -> RequestGroup:
    device = batch.positions.device
    starts = torch.tensor([batch.query_start_loc_list[request] for request in requests], device=device)  # [R]
    tokens = starts.unsqueeze(1) + torch.arange(num_queries, device=device)  # [R, Q]
    first_positions = [batch.seq_lens_list[request] - num_queries for request in requests]
    return RequestGroup(
        tokens=tokens,
        positions=batch.positions[tokens],
        slots=context_slots(batch, torch.tensor(requests, device=device), num_tiles * _TILE_WIDTH),
        first_position=min(first_positions),
        last_position=max(first_positions),
        ends=None if batch.visible_ends is None else batch.visible_ends[tokens].long(),
    )


def _gather_tiles(pool: Tensor, slots: Tensor) -> Tensor:
    """Return [R, G, N, W, D] float32 from pool [num_slots, G, D]."""
    gathered = pool.index_select(0, slots.flatten()).float()  # [R * N * W, G, D]
    tiles = gathered.view(slots.shape[0], -1, _TILE_WIDTH, *pool.shape[1:])  # [R, N, W, G, D]
    return tiles.permute(0, 3, 1, 2, 4).contiguous()


def _hidden(positions: Tensor, ends: Tensor | None, tiles: slice, layer: AttentionLayer) -> Tensor:
    """Return the mask [R, N, Q, W] bool: True where tokens at `positions` [R, Q] may not see these tiles' positions."""
    keys = torch.arange(tiles.start * _TILE_WIDTH, tiles.stop * _TILE_WIDTH, device=positions.device)
    keys, queries = keys.view(1, -1, 1, _TILE_WIDTH), positions[:, None, :, None]  # [1, N, 1, W], [R, 1, Q, 1]
    hidden = keys > queries if ends is None else keys >= ends[:, None, :, None]
    if layer.chunk_size is not None:
        hidden = hidden | (keys < queries - queries % layer.chunk_size)
    return hidden if layer.sliding_window is None else hidden | (keys <= queries - layer.sliding_window)


def _attend(
    query: Tensor,  # [R, Q, H, D] float32, scaled
    keys: Tensor,  # [R, G, N, W, D]
    values: Tensor,  # [R, G, N, W, V]; V is D, but for latent layers
    hidden: Tensor,  # [R, N, Q, W]
    layer: AttentionLayer,
) -> Tensor:  # [R, Q, H, V]
    num_requests, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, group_size = keys.shape[1], num_heads // keys.shape[1]
    rows = query.view(num_requests, num_queries, num_kv_heads, group_size, head_dim).transpose(1, 2).flatten(2, 3)
    num_rows = num_queries * group_size
    rows = F.pad(rows, (0, 0, 0, -num_rows % _NUM_ROWS))  # [R, G, S * 16, D]
    hidden = F.pad(hidden.repeat_interleave(group_size, dim=2), (0, 0, 0, rows.shape[2] - num_rows))

    scores = _matmul_tiles(rows.unsqueeze(2), keys.transpose(3, 4))  # [R, G, N, S * 16, W]
    if layer.soft_cap is not None:
        scores = hyperbolic_tangent(scores / layer.soft_cap) * layer.soft_cap
    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    most = scores.amax(dim=(2, 4), keepdim=True)  # [R, G, 1, S * 16, 1]
    if layer.sinks is not None:
        sinks = F.pad(layer.sinks.view(num_kv_heads, -1).repeat(1, num_queries), (0, rows.shape[2] - num_rows))
        sinks = sinks.view(1, num_kv_heads, 1, -1, 1)
        most = most.maximum(sinks)
    scores -= most
    weights = scores.exp_()  # masked ones are exact zeros
    mixed = _sum_in_order(_matmul_tiles(weights, values))  # [R, G, S * 16, V]
    total = _sum_in_order(weights.sum(-1, keepdim=True))  # [R, G, S * 16, 1]
    if layer.sinks is not None:
        total += (sinks - most).exp_()[:, :, 0]
    result = (mixed / total)[:, :, :num_rows]
    result = result.reshape(num_requests, num_kv_heads, num_queries, group_size, -1)
    return result.transpose(1, 2).flatten(2, 3)


def _matmul_tiles(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [R, G, N or 1, S * 16, K] by [R, G, N, K, L] in at least two matmuls of 16 rows."""
    batch, num_sets = right.shape[:3], left.shape[3] // _NUM_ROWS
    left = left.expand(*batch, *left.shape[3:]).reshape(-1, _NUM_ROWS, left.shape[4])  # [R * G * N * S, 16, K]
    right = right.unsqueeze(3).expand(*batch, num_sets, *right.shape[3:]).flatten(0, 3)  # a copy only where S > 1
    if len(left) == 1:
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    return torch.bmm(left, right)[: batch.numel() * num_sets].view(*batch, -1, right.shape[-1])


def _sum_in_order(tiles: Tensor) -> Tensor:
    """Add [R, G, N, M, D] over N from the first tile to the last: zeros before or after change no bit."""
    total = tiles[:, :, 0].clone()
    for tile in tiles.unbind(2)[1:]:
        total += tile
    return total
