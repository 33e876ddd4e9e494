"""Weights of attention besides its projections. Legend: H = query heads of this rank, E = head size."""

from collections.abc import Mapping

import torch

from octavo.attention.base import HeadNorms
from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import PlainWeights


class HeadNormWeights(PlainWeights):
    """The weights of per-head query and key norms; backends read `values`. `offset` is added to a checkpoint's.

    A layer that projects no keys has queries' only.
    """

    def __init__(
        self, head_dim: int, eps: float, *, context: BuildContext, offset: float = 0.0, has_keys: bool = True
    ) -> None:
        query, key = torch.ones(2, head_dim, dtype=torch.float32, device=context.device)  # [E] each
        tensors = {"query.weight": query, "key.weight": key} if has_keys else {"query.weight": query}
        super().__init__(tensors, context=context)
        self.values, self._offset = HeadNorms(query=query, key=key, eps=eps), offset

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.float() + self._offset if self._offset else tensor)


class SinkWeights(PlainWeights):
    """Attention sinks: one logit per query head that absorbs softmax weight; `values` are this rank's heads."""

    def __init__(self, heads: Share, *, context: BuildContext) -> None:
        values = torch.empty(heads.size, dtype=torch.float32, device=context.device)  # [H]
        super().__init__({"sinks": values}, context=context)
        self.values, self._heads = values, heads

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {"sinks": TensorSpec((self._heads.total,))}

    @property
    def num_weights(self) -> int:
        return self._heads.size

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sinks": tensors["sinks"][self._heads.start : self._heads.stop]}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        is_shard = len(tensor) == self._heads.size
        super().load_weight(name, tensor if is_shard else self.shard_of({name: tensor})[name])
