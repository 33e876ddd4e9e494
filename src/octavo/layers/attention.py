"""Attention of one layer: rotate queries and keys, then let the backend store and attend.

Legend: T = tokens, H = query heads, G = kv heads, D = head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStep:
    """What all layers of one step share; made once per step by the model."""

    batch: ForwardBatch
    plan: Any  # of the attention backend
    cos: torch.Tensor  # [T, D / 2] float32
    sin: torch.Tensor  # [T, D / 2] float32


class Attention(nn.Module):
    """Causal attention with rotary positions. No parameters: those are the projections' around it."""

    def __init__(self, head_dim: int, sliding_window: int | None, *, context: BuildContext) -> None:
        super().__init__()
        self._kernels, self._backend = context.kernels, context.attention
        self._scale = head_dim**-0.5
        self._sliding_window = sliding_window

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        kv_cache: LayerKVCache,
        step: AttentionStep,
    ) -> torch.Tensor:  # [T, H, D]
        """Write this step's keys and values to the cache, and attend to all of each request's context."""
        return self._backend.forward(
            self._kernels.rotary(query, step.cos, step.sin),
            self._kernels.rotary(key, step.cos, step.sin),
            value,
            kv_cache,
            step.batch,
            step.plan,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
