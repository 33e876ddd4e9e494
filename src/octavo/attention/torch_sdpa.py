"""Attention by torch's fused kernel, request by request. Fast, not batch-invariant.

The kernel supports neither soft caps, sinks nor values smaller than keys (latent layers): layers with one of these are
computed op by op, which materializes all scores.

A request whose blocks are contiguous in the pool is read in place; other contexts are gathered, once per layer. On one
core, contexts of 160 to 520 positions read in place take 20 us plus their bytes at 10 GB/s; gathered, they take 1.2 to
3 times as long, and padded to one call for all requests, 3 to 5 times.

Decoding over a long context on a CPU attends to its tiles as a batch, then merges them by their sums of weights: the
kernel walks the slots of one kv head after another. They are G * D values apart, and beyond some 500 positions their
cache lines evict each other. Tiles of 64 positions as one batch took two thirds of the time from 1,000 positions on,
and the same time at 500 (one core, bfloat16, G * D = 1024). Source of the merge: Dao et al. 2023, Flash-Decoding; Rabe
and Staats 2021, arXiv:2112.05682.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, D = head size, Q = new tokens of one
request, C = its context positions, N = tiles, W = tile width.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.base import AttentionLayer, TorchAttention, context_slots
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache

_TILE_WIDTH = 64
_SHORTEST_TILED = 640  # context positions
_MAX_SCORES = 1 << 24  # per pass over a request's tokens: 64 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpan:
    """One request of the step."""

    num_queries: int  # Q
    context_len: int  # C
    first_slot: int
    slots: Tensor | None  # [C] int64; None: contiguous, from `first_slot` on
    ends: Tensor | None = None  # [Q], see `ForwardBatch.visible_ends`
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window, built by the first layer

    def start(self, sliding_window: int | None) -> int:
        """Return the first position that any of the new tokens sees."""
        return 0 if sliding_window is None else max(0, self.context_len - self.num_queries + 1 - sliding_window)

    def read(self, pool: Tensor, start: int) -> Tensor:
        """Return positions `start` ... of the context, [1, G, C - start, D], out of pool [1, G, num_slots, D]."""
        if self.slots is None:
            return pool.narrow(2, self.first_slot + start, self.context_len - start)
        # Whole slots of G * D contiguous values: three times as fast as gathering per kv head.
        slots_first = pool[0].transpose(0, 1)  # [num_slots, G, D]
        return slots_first.index_select(0, self.slots[start:]).transpose(0, 1).unsqueeze(0)

    def mask(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """Return what each new token sees from `start` on: [Q, C - start] bool."""
        if sliding_window not in self.masks:
            keys = torch.arange(self.start(sliding_window), self.context_len, device=device)
            queries = keys[-self.num_queries :].unsqueeze(1)  # [Q, 1]
            visible = keys <= queries if self.ends is None else keys < self.ends.unsqueeze(1)
            if sliding_window is not None:
                visible &= keys > queries - sliding_window
            self.masks[sliding_window] = visible
        return self.masks[sliding_window]


class SdpaAttention(TorchAttention[list[RequestSpan]]):
    """Fast, not batch-invariant; see above."""

    name = "torch-sdpa"
    is_batch_invariant = False
    features = frozenset({"soft_cap", "sinks", "value_norm", "kv_sharing", "latent", "chunks"})

    def plan(self, batch: ForwardBatch) -> list[RequestSpan]:
        """Locate each request's context."""
        starts, lens = batch.query_start_loc_list, batch.seq_lens_list
        blocks = batch.block_table.cpu()  # [R, B]
        first_blocks = blocks[:, 0].tolist()  # [R]
        neighbors = (blocks.diff(dim=1) == 1).cumprod(dim=1).sum(dim=1).tolist()  # [R], contiguous after the first
        in_pieces = [
            request for request in range(len(lens)) if (neighbors[request] + 1) * batch.block_size < lens[request]
        ]
        slots, ends = _slots_of(batch, in_pieces), batch.visible_ends
        return [
            RequestSpan(
                num_queries=starts[request + 1] - starts[request],
                context_len=lens[request],
                first_slot=first_blocks[request] * batch.block_size,
                slots=slots.get(request),
                ends=None if ends is None else ends[starts[request] : starts[request + 1]],
            )
            for request in range(len(lens))
        ]

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        plan: list[RequestSpan] = step.plans[layer.kv_group]
        keys, values = (pool.transpose(0, 1).unsqueeze(0) for pool in (kv_cache.key, kv_cache.value))
        queries = torch.split(query.transpose(0, 1).unsqueeze(0), [span.num_queries for span in plan], dim=2)
        is_plain = layer.soft_cap is None and layer.sinks is None and layer.latent is None and layer.chunk_size is None
        attend = _attend if is_plain else _attend_as_defined
        results = [attend(rows, keys, values, span, layer) for rows, span in zip(queries, plan, strict=True)]
        return torch.cat(results, dim=1)[0].flatten(1)


def _slots_of(batch: ForwardBatch, requests: list[int]) -> dict[int, Tensor]:
    """Return the slots [C] of each of these requests."""
    if not requests:
        return {}
    lens = [batch.seq_lens_list[request] for request in requests]
    slots = context_slots(batch, torch.tensor(requests, device=batch.seq_lens.device), max(lens))  # [R, most C]
    return {request: row[:length] for request, row, length in zip(requests, slots.unbind(), lens, strict=True)}


def _attend(
    query: Tensor,  # [1, H, Q, D]
    keys: Tensor,  # [1, G, num_slots, D]
    values: Tensor,  # [1, G, num_slots, D]
    span: RequestSpan,
    layer: AttentionLayer,
) -> Tensor:  # [1, Q, H, D]
    scale, sliding_window = layer.softmax_scale, layer.sliding_window
    start = span.start(sliding_window)
    context_keys, context_values = span.read(keys, start), span.read(values, start)  # [1, G, C - start, D]
    is_long = query.device.type == "cpu" and span.context_len - start >= _SHORTEST_TILED
    if span.num_queries == 1 and is_long:
        return _attend_in_tiles(query, context_keys, context_values, scale).transpose(1, 2)
    is_whole = span.num_queries == span.context_len and (sliding_window is None or sliding_window >= span.context_len)
    is_whole &= span.ends is None
    needs_mask = span.num_queries > 1 and not is_whole
    result = F.scaled_dot_product_attention(
        query,
        context_keys,
        context_values,
        attn_mask=span.mask(sliding_window, query.device) if needs_mask else None,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return result.transpose(1, 2)


def _attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with query [1, H, 1, D] to all of keys and values [1, G, C, D]; return [1, H, 1, D]."""
    num_tiled = keys.shape[2] // _TILE_WIDTH * _TILE_WIDTH
    outs, log_sums = _attend_tiles(query, _tiles(keys, num_tiled), _tiles(values, num_tiled), scale)
    if num_tiled < keys.shape[2]:
        rest = _attend_tiles(query, keys[:, :, num_tiled:], values[:, :, num_tiled:], scale)
        outs, log_sums = torch.cat((outs, rest[0])), torch.cat((log_sums, rest[1]))
    shares = log_sums.softmax(dim=0).unsqueeze(-1)  # [N, H, 1, 1], each tile's share of the weights
    return (outs * shares).sum(dim=0, keepdim=True).to(query.dtype)


def _tiles(kv: Tensor, num_tiled: int) -> Tensor:
    """Return the first N * W positions of [1, G, C, D] as a view [N, G, W, D]."""
    slots_first = kv[0].transpose(0, 1)[:num_tiled]  # [N * W, G, D]
    return slots_first.view(-1, _TILE_WIDTH, *slots_first.shape[1:]).transpose(1, 2)


def _attend_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to each of N tiles [N, G, W, D]; return [N, H, 1, D] and the logarithms of summed weights [N, H, 1]."""
    queries = query.expand(len(keys), -1, -1, -1)
    # The op that implements scaled_dot_product_attention, which does not return the sums.
    outs, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, scale=scale)
    return outs, log_sums


def _attend_as_defined(query: Tensor, keys: Tensor, values: Tensor, span: RequestSpan, layer: AttentionLayer) -> Tensor:
    """Do the same in float32, one pass of tokens at a time: scaled scores, soft cap, mask, softmax with sinks, mean."""
    start, num_groups = span.start(layer.sliding_window), keys.shape[1]
    context_keys, context_values = (span.read(pool, start)[0].float() for pool in (keys, values))  # [G, C - start, D]
    hidden = ~span.mask(layer.sliding_window, query.device)  # [Q, C - start]
    if layer.chunk_size is not None:
        positions = torch.arange(start, span.context_len, device=query.device)
        queries = positions[-span.num_queries :].unsqueeze(1)  # [Q, 1]
        hidden |= positions < queries - queries % layer.chunk_size
    size = max(1, _MAX_SCORES // (query.shape[1] * hidden.shape[1]))
    results = []
    passes = zip(torch.split(query[0], size, dim=1), torch.split(hidden, size), strict=True)
    for rows, is_hidden in passes:  # [H, rows of the pass, D], [rows of the pass, C - start]
        by_group = rows.float().reshape(num_groups, -1, layer.head_dim)  # [G, H / G * rows, D]
        scores = by_group @ context_keys.transpose(1, 2) * layer.softmax_scale
        scores = scores.view(*rows.shape[:2], -1)  # [H, Q, C - start]
        if layer.soft_cap is not None:
            scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)), dim=-1)
        weights = scores.softmax(-1)[..., : hidden.shape[1]]
        results.append((weights.reshape(num_groups, -1, hidden.shape[1]) @ context_values).view(*rows.shape[:2], -1))
    return torch.cat(results, dim=1).transpose(0, 1).unsqueeze(0).to(query.dtype)
