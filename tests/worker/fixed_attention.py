"""Capturable attention for tests, in plain float64: its launches depend only on shapes.

Legend: T = tokens, H = query heads, G = kv heads, E = head size, C = positions up to the longest context's bound.
"""

import torch

from octavo.attention.base import AttentionLayer, TorchAttention, context_slots
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache


class FixedAttention(TorchAttention[torch.Tensor]):
    """See `AttentionBackend`. Each token attends alone, so that its bits are its own."""

    name = "fixed"
    is_batch_invariant = True
    is_capturable = True

    def plan(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the slots of every token's context [T, C]."""
        requests = torch.searchsorted(batch.query_start_loc[1:], torch.arange(len(batch.positions)), right=True)
        return context_slots(batch, requests, max(batch.seq_lens_list))

    def attend(
        self, query: torch.Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer
    ) -> torch.Tensor:
        plan: torch.Tensor = step.plans[layer.kv_group]
        batch = step.batch.of_group(layer.kv_group)
        queries = query.double().view(len(query), layer.num_kv_heads, -1, layer.head_dim)  # [T, G, H / G, E]
        keys, values = kv_cache.key[plan].double(), kv_cache.value[plan].double()  # [T, C, G, E]
        scores = (queries[:, None] * keys[:, :, :, None]).sum(-1) * layer.softmax_scale  # [T, C, G, H / G]
        places = torch.arange(plan.shape[1])
        is_seen = places <= batch.positions[:, None]  # [T, C]
        if layer.sliding_window is not None:
            is_seen &= places > batch.positions[:, None] - layer.sliding_window
        weights = torch.exp(scores.masked_fill(~is_seen[:, :, None, None], -1e9))
        attended = (weights[..., None] * values[:, :, :, None]).sum(1) / weights.sum(1)[..., None]
        return attended.flatten(1).to(query.dtype)
