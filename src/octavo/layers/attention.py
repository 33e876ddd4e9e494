"""Attention of one layer: hand the projection to the backend with all that it needs to know.

Legend: T = tokens, H = query heads, G = kv heads, E = head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.attention.base import AttentionLayer, HeadNorms
from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.layers.context import BuildContext
from octavo.layers.weight_owner import WeightOwner


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """What all layers of one step share; made once per step by the model."""

    batch: ForwardBatch
    plans: tuple[Any, ...]  # of the attention backend, one for each KV group that attends
    cos: torch.Tensor  # [T, E / 2] float32
    sin: torch.Tensor  # [T, E / 2] float32


class HeadNormWeights(WeightOwner):
    """The weights of norms over each head of queries and keys; `values` is what a backend reads."""

    def __init__(self, head_dim: int, eps: float, *, context: BuildContext) -> None:
        super().__init__()
        query, key = torch.empty(2, head_dim, dtype=torch.float32, device=context.device)  # [E] each
        self.values = HeadNorms(query=query, key=key, eps=eps)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"query.weight": tuple(self.values.query.shape), "key.weight": tuple(self.values.key.shape)}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.packed_tensors()[name].copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"query.weight": self.values.query, "key.weight": self.values.key}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.load_weight(name, tensor)


class Attention(nn.Module):
    """Causal attention of one layer, without the projections around it."""

    def __init__(self, layer: AttentionLayer, *, context: BuildContext) -> None:
        super().__init__()
        self._layer, self._backend = layer, context.attention

    def forward(
        self,
        qkv: torch.Tensor,  # [T, (H + 2 * G) * E]
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> torch.Tensor:  # [T, H * E]
        """Write this step's keys and values to the cache, and attend to all of each request's context."""
        group = self._layer.kv_group
        batch, plan = step.batch.of_group(group), step.plans[group]
        return self._backend.forward(qkv, step.cos, step.sin, kv_cache, batch, plan, self._layer)
