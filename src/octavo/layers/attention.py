"""Attention of one layer: passes the projection and the layer's parameters to the backend.

Legend: T = tokens, H = query heads, G = kv heads, E = head size.
"""

from collections.abc import Mapping

import torch
from torch import nn

from octavo.attention.base import AttentionLayer, HeadNorms
from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.distributed.shares import Share
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class HeadNormWeights(WeightOwner):
    """The weights of per-head query and key norms; backends read `values`. `offset` is added to a checkpoint's."""

    def __init__(self, head_dim: int, eps: float, *, context: BuildContext, offset: float = 0.0) -> None:
        super().__init__()
        self._context, self._offset = context, offset
        query, key = torch.empty(2, head_dim, dtype=torch.float32, device=context.device)  # [E] each
        self.values = HeadNorms(query=query, key=key, eps=eps)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape)) for name, tensor in self.packed_tensors().items()}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.packed_tensors()[name].copy_(tensor.float() + self._offset if self._offset else tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"query.weight": self.values.query, "key.weight": self.values.key}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.packed_tensors()[name].copy_(tensor)


class SinkWeights(WeightOwner):
    """Attention sinks: one logit per query head that absorbs softmax weight; `values` are this rank's heads."""

    def __init__(self, heads: Share, *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._heads = context, heads
        self.values = torch.empty(heads.size, dtype=torch.float32, device=context.device)  # [H]

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {"sinks": TensorSpec((self._heads.total,))}

    @property
    def num_weights(self) -> int:
        return self._heads.size

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sinks": tensors["sinks"][self._heads.start : self._heads.stop]}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        is_shard = len(tensor) == self._heads.size
        self.values.copy_(tensor if is_shard else tensor[self._heads.start : self._heads.stop])

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"sinks": self.values}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.values.copy_(tensors["sinks"])


class Attention(nn.Module):
    """Causal attention of one layer, without the projections around it."""

    def __init__(self, layer: AttentionLayer, *, context: BuildContext) -> None:
        super().__init__()
        context.attention.check(layer)
        self._layer, self._backend = layer, context.attention

    def forward(
        self,
        qkv: torch.Tensor,  # [T, (H + 2 * G) * E]
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> torch.Tensor:  # [T, H * E]
        """Write this step's keys and values to the cache, and attend to all of each request's context."""
        return self._backend.forward(qkv, kv_cache, step, self._layer)
