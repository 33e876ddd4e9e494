"""Weights of attention besides its projections.

Legend: T = tokens, H = query heads of this rank, G = kv heads of this rank, E = head size.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import layer_norm

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


class ShardedWeights(PlainWeights):
    """Tensors of which each rank has a share of the rows, by name."""

    def __init__(self, tensors: dict[str, torch.Tensor], shares: Mapping[str, Share], *, context: BuildContext) -> None:
        super().__init__(tensors, context=context)
        self._shares = shares

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        shapes = {name: tensor.shape[1:] for name, tensor in self._tensors.items()}
        return {name: TensorSpec((share.total, *shapes[name])) for name, share in self._shares.items()}

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[self._shares[name].start : self._shares[name].stop] for name, tensor in tensors.items()}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        is_shard = len(tensor) == self._shares[name].size
        super().load_weight(name, tensor if is_shard else self.shard_of({name: tensor})[name])


class WholeNormWeights(ShardedWeights):
    """The weights of one norm over all query heads, and one over all kv heads. Ranks add up their sums of squares."""

    values = None  # backends normalize nothing

    def __init__(self, heads: HeadShare, head_dim: int, eps: float, *, context: BuildContext) -> None:
        named = {"query.weight": heads.query.times(head_dim), "key.weight": heads.kv.times(head_dim)}
        shares = named.values()
        weights = [torch.empty(share.size, dtype=torch.float32, device=context.device) for share in shares]
        super().__init__(dict(zip(named, weights, strict=True)), named, context=context)
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


class HeadByHeadNormWeights(ShardedWeights):
    """The weights of layer norms of queries and keys, another for each head, without biases."""

    values = None  # backends normalize nothing
    is_recordable = False  # op by op

    def __init__(self, heads: HeadShare, head_dim: int, eps: float, *, context: BuildContext) -> None:
        shares, num_queries = {"query.weight": heads.query, "key.weight": heads.kv}, heads.query.size
        num_heads = num_queries + heads.kv.size
        whole = torch.empty(num_heads, head_dim, dtype=torch.float32, device=context.device)  # [H + G, E]
        tensors = {"query.weight": whole[:num_queries], "key.weight": whole[num_queries:]}
        super().__init__(tensors, shares, context=context)
        self._weights, self._eps = whole, eps

    def of_projection(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalize queries and keys of qkv [T, (H + 2 * G) * E]."""
        split = self._weights.numel()
        heads = qkv[:, :split].view(len(qkv), *self._weights.shape).float()
        normed = layer_norm(heads, heads.shape[2:], eps=self._eps) * self._weights
        return torch.cat([normed.to(qkv.dtype).flatten(1), qkv[:, split:]], dim=1)


class SinkWeights(ShardedWeights):
    """Attention sinks: one logit per query head that absorbs softmax weight; `values` are this rank's heads."""

    def __init__(self, heads: Share, *, context: BuildContext) -> None:
        values = torch.empty(heads.size, dtype=torch.float32, device=context.device)  # [H]
        super().__init__({"sinks": values}, {"sinks": heads}, context=context)
        self.values = values
