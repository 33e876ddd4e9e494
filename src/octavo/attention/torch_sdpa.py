"""Attention by torch's own fused kernel, request by request. Fast, not row-invariant.

A request whose blocks are neighbours in the pool is read where it lies; any other context is gathered once per layer.
Query heads that share a kv head are folded into rows when decoding, so keys and values are never repeated.

Legend: T = tokens of the step, H = query heads, G = kv heads, D = head size, Q = new tokens of one request,
C = its context positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.attention.paged import context_slots, write_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpan:
    """One request of the step."""

    tokens: slice  # of the flat [T]
    context_len: int  # C
    first_slot: int | None  # where the whole context lies in one piece; None: use `slots`
    slots: torch.Tensor  # [C] int64

    @property
    def num_queries(self) -> int:
        return int(self.tokens.stop - self.tokens.start)

    def read(self, pool: torch.Tensor, start: int) -> torch.Tensor:
        """Return positions `start` ... of the context as [1, G, C - start, D], a view where it lies in one piece."""
        if self.first_slot is None:
            context = pool.index_select(0, self.slots[start:])
        else:
            context = pool[self.first_slot + start : self.first_slot + self.context_len]
        return context.transpose(0, 1).unsqueeze(0)


class SdpaAttention:
    """See `AttentionBackend`."""

    name = "torch-sdpa"
    is_row_invariant = False

    def plan(self, batch: ForwardBatch) -> list[RequestSpan]:
        """Find each request's tokens and context."""
        starts = batch.query_start_loc_list
        return [
            _make_span(batch, request, slice(starts[request], starts[request + 1]))
            for request in range(len(batch.seq_lens_list))
        ]

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        plan: list[RequestSpan],
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:  # [T, H, D]
        write_kv(key, value, kv_cache, batch.slot_mapping)
        out = torch.empty_like(query)
        for span in plan:
            attend = _decode if span.num_queries == 1 else _prefill
            out[span.tokens] = attend(query[span.tokens], kv_cache, span, scale, sliding_window)
        return out


def _make_span(batch: ForwardBatch, request: int, tokens: slice) -> RequestSpan:
    context_len = batch.seq_lens_list[request]
    slots = context_slots(batch, torch.tensor([request], device=batch.seq_lens.device), context_len)[0]  # [C]
    first = int(slots[0])
    in_one_piece = torch.equal(slots, torch.arange(first, first + context_len, device=slots.device))
    return RequestSpan(tokens=tokens, context_len=context_len, first_slot=first if in_one_piece else None, slots=slots)


def _decode(
    query: torch.Tensor, kv_cache: LayerKVCache, span: RequestSpan, scale: float, sliding_window: int | None
) -> torch.Tensor:
    """Attend with one token: query [1, H, D] to [1, H, D]. It sees all of its context, or the window's last part."""
    start = max(0, span.context_len - sliding_window) if sliding_window is not None else 0
    keys, values = span.read(kv_cache.key, start), span.read(kv_cache.value, start)  # [1, G, C, D]
    rows = query.view(1, keys.shape[1], -1, query.shape[-1])  # [1, G, H / G, D]
    return F.scaled_dot_product_attention(rows, keys, values, scale=scale).view_as(query)


def _prefill(
    query: torch.Tensor, kv_cache: LayerKVCache, span: RequestSpan, scale: float, sliding_window: int | None
) -> torch.Tensor:
    """Attend with several tokens: query [Q, H, D] to [Q, H, D]."""
    keys, values = (
        _repeat_heads(span.read(pool, 0), query.shape[1]) for pool in (kv_cache.key, kv_cache.value)
    )  # [1, H, C, D] each
    is_whole = span.num_queries == span.context_len and (sliding_window is None or sliding_window >= span.context_len)
    mask = None if is_whole else _visible(span, sliding_window, query.device)
    rows = query.transpose(0, 1).unsqueeze(0)  # [1, H, Q, D]
    result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, is_causal=is_whole, scale=scale)
    return result[0].transpose(0, 1)


def _repeat_heads(kv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Show [1, G, C, D] as [1, H, C, D]."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)


def _visible(span: RequestSpan, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Return [Q, C] bool: which positions each new token sees."""
    keys = torch.arange(span.context_len, device=device)  # [C]
    queries = keys[-span.num_queries :].unsqueeze(1)  # [Q, 1]
    visible = keys <= queries
    return visible if sliding_window is None else visible & (keys > queries - sliding_window)
