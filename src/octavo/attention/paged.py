"""What the torch backends share: writing keys and values to their slots, and finding a request's context again.

Legend: T = tokens of the step, R = requests, G = kv heads, D = head size, C = context positions.
"""

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: LayerKVCache, slot_mapping: torch.Tensor) -> None:
    """Store key and value, each [T, G, D], in the slots [T] of the pool."""
    kv_cache.key.index_copy_(0, slot_mapping, key)
    kv_cache.value.index_copy_(0, slot_mapping, value)


def context_slots(batch: ForwardBatch, requests: torch.Tensor, length: int) -> torch.Tensor:
    """Return the slots [R, length] of positions 0 ... length - 1 of `requests` [R].

    Positions past a request's context repeat its last one: a slot of someone else's is never read, so nothing in it,
    not even a NaN, can show.
    """
    last = (batch.seq_lens[requests].long() - 1).unsqueeze(1)  # [R, 1]
    positions = torch.arange(length, device=last.device).minimum(last)  # [R, C]
    blocks = batch.block_table[requests].long().gather(1, positions // batch.block_size)  # [R, C]
    return blocks * batch.block_size + positions % batch.block_size
