"""Shared by the torch backends: heads of queries, keys and values, and a request's context in paged memory.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, C = context positions.
"""

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer, KVLayout, PlanT
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache, RotaryTable
from octavo.kernels.reference import Kernels


class TorchAttention(AttentionBackend[PlanT]):
    """A backend that stores keys and values unchanged and computes with torch ops."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels, dtype

    def kv_layout(self, head_dim: int) -> KVLayout:
        return KVLayout(head_size=head_dim, dtype=self._dtype)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        query, key, value = split_heads(qkv, step.rotary, layer, self._kernels)
        slots = step.batch.of_group(layer.kv_group).slot_mapping
        kv_cache.key.index_copy_(0, slots, key)
        kv_cache.value.index_copy_(0, slots, value)
        return query


def split_heads(
    qkv: Tensor,  # [T, (H + 2 * G) * E]
    rotary: tuple[RotaryTable, ...],
    layer: AttentionLayer,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [T, H, E] and key [T, G, E], normalized and rotated, and value [T, G, E]."""
    counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    query, key, value = qkv.view(len(qkv), -1, layer.head_dim).split_with_sizes(counts, dim=1)
    if layer.norms is not None:
        query = kernels.rms_norm(query, layer.norms.query, layer.norms.eps)
        key = kernels.rms_norm(key, layer.norms.key, layer.norms.eps)
    if layer.rotary is not None:
        cos, sin = rotary[layer.rotary]
        query, key = kernels.rotary(query, cos, sin), kernels.rotary(key, cos, sin)
    return query, key, value


def context_slots(batch: ForwardBatch, requests: Tensor, length: int) -> Tensor:
    """Return the slots [R, length] of positions 0 ... length - 1 of `requests` [R].

    Positions past a request's context repeat its last one: slots of other requests are never read, so nothing in them,
    not even a NaN, has an effect.
    """
    last = (batch.seq_lens[requests].long() - 1).unsqueeze(1)  # [R, 1]
    positions = torch.arange(length, device=last.device).minimum(last)  # [R, C]
    blocks = batch.block_table[requests].long().gather(1, positions // batch.block_size)  # [R, C]
    return blocks * batch.block_size + positions % batch.block_size
