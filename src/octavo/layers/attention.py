"""Weights of attention besides its projections.

Legend: T = tokens, H = query heads of this rank, G = kv heads of this rank, E = head size.
"""

from collections.abc import Mapping

import torch

from octavo.attention.base import HeadNorms
from octavo.config.layers import AttentionSpec
from octavo.distributed.groups import HeadShare, Share
from octavo.kernels.types import PartNorms
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import PlainWeights


class HeadNormWeights(PlainWeights):
    """The weights of per-head query and key norms; backends read `values`. `offset` is added to a checkpoint's.

    A layer that projects no keys has queries' only. Where checkpoints have none, they are 1.
    """

    values: HeadNorms | None

    def __init__(self, spec: AttentionSpec, eps: float, *, context: BuildContext, offset: float = 0.0) -> None:
        query, key = torch.ones(2, spec.head_dim, dtype=torch.float32, device=context.device)  # [E] each
        tensors = {"query.weight": query, "key.weight": key} if spec.projects != "q" else {"query.weight": query}
        super().__init__(tensors if spec.has_norm_weights else {}, context=context)
        self.values, self._offset = HeadNorms(query=query, key=key, eps=eps), offset

    def of_projection(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return qkv [T, (H + 2 * G) * E] as backends take it: they normalize heads themselves."""
        return qkv

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.float() + self._offset if self._offset else tensor)


class WholeNormWeights(PlainWeights):
    """The weights of one norm over all query heads, and one over all kv heads. Ranks add up their sums of squares."""

    values = None  # backends normalize nothing

    def __init__(self, heads: HeadShare, head_dim: int, eps: float, *, context: BuildContext) -> None:
        self._shares = {"query.weight": heads.query.times(head_dim), "key.weight": heads.kv.times(head_dim)}
        shares = self._shares.values()
        weights = [torch.empty(share.size, dtype=torch.float32, device=context.device) for share in shares]
        super().__init__(dict(zip(self._shares, weights, strict=True)), context=context)
        sizes, totals = ((query, key) for query, key in zip(*((of.size, of.total) for of in shares), strict=True))
        self._norms = PartNorms(sizes=sizes, totals=totals, weights=(weights[0], weights[1]), eps=eps)
        # Of ranks that have the same kv heads, the first counts them.
        is_first = heads.query.start * heads.kv.total == heads.kv.start * heads.query.total
        self._num_counted = 2 if is_first else 1

    def of_projection(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalize queries and keys of qkv [T, (H + 2 * G) * E]."""
        kernels, norms = self._context.kernels, self._norms
        squares = kernels.part_squares(qkv, norms.sizes, self._num_counted)
        return kernels.scale_parts(qkv, self._context.groups.tensor.all_reduce(squares), norms)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec((share.total,)) for name, share in self._shares.items()}

    @property
    def num_weights(self) -> int:
        return sum(share.size for share in self._shares.values())

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[self._shares[name].start : self._shares[name].stop] for name, tensor in tensors.items()}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        is_shard = len(tensor) == self._shares[name].size
        super().load_weight(name, tensor if is_shard else self.shard_of({name: tensor})[name])


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
