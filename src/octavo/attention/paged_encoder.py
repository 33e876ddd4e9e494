"""Attention of encoders by a backend for paged context: each segment is a prompt whose tokens attend to each other.

It keeps nothing after a step. One call rotates and attends to all segments, whatever their lengths.

Legend: P = rows of all segments, S = segments, H = heads, E = head size.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer
from octavo.attention.encoder import EncoderHeads, EncoderSegments
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache, RotaryTable

_TILE, _MAX_BLOCK = 32, 256  # slots: backends lay blocks of whole tiles out for their products


class PagedSegments(EncoderSegments):
    """See `EncoderSegments`."""

    def __init__(
        self, backend: AttentionBackend[Any], lengths: Sequence[int], rotary: RotaryTable | None, dtype: torch.dtype
    ) -> None:
        """Take the `lengths` [S], which add up to P, and cos and sin, [P, E / 2] float32 each; None: no rotation."""
        batch = _batch_of(list(lengths))
        self._backend, self._dtype = backend, dtype
        self._step = AttentionMetadata(
            batch=batch, plans=(backend.plan(batch),), rotary=() if rotary is None else (rotary,)
        )
        self._memory: tuple[AttentionLayer, LayerKVCache] | None = None

    def attend(self, qkv: Tensor, heads: EncoderHeads) -> Tensor:
        """See `EncoderSegments.attend`."""
        if self._memory is None:
            self._memory = self._layer_of(heads), self._memory_for(heads)
        layer, memory = self._memory
        return self._backend.forward(qkv, memory, self._step, layer)

    def _layer_of(self, heads: EncoderHeads) -> AttentionLayer:
        return AttentionLayer(
            num_heads=heads.count,
            num_kv_heads=heads.count,
            head_dim=heads.size,
            sliding_window=None,
            rotary=0 if self._step.rotary else None,
        )

    def _memory_for(self, heads: EncoderHeads) -> LayerKVCache:
        batch = self._step.batch
        num_slots = (int(batch.block_table.max()) + 1) * batch.block_size
        shape = num_slots, heads.count, self._backend.kv_layout(heads.size).head_size
        return LayerKVCache(torch.zeros(shape, dtype=self._dtype), torch.zeros(shape, dtype=self._dtype))


def _batch_of(lengths: list[int]) -> ForwardBatch:
    """Return a step of S requests, new ones, whose tokens see their whole prompt."""
    block_size = min(_MAX_BLOCK, -(-max(lengths) // _TILE) * _TILE)
    starts, counts = [0, *accumulate(lengths)], torch.tensor(lengths)
    num_blocks = -(-counts // block_size)  # [S]
    first_blocks = num_blocks.cumsum(0) - num_blocks
    numbers = torch.arange(int(num_blocks.max()))
    table = (first_blocks[:, None] + numbers).where(numbers < num_blocks[:, None], 0)
    positions = torch.arange(starts[-1]) - torch.tensor(starts[:-1]).repeat_interleave(counts)  # [P]
    return ForwardBatch(
        input_ids=positions,  # not read
        positions=positions,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=counts.to(torch.int32),
        slot_mapping=positions + (first_blocks * block_size).repeat_interleave(counts),
        block_table=table.to(torch.int32),
        logits_indices=positions[:1],  # not read
        block_size=block_size,
        query_start_loc_list=starts,
        seq_lens_list=lengths,
        visible_ends=counts.to(torch.int32).repeat_interleave(counts),
    )
