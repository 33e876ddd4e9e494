"""Octavo's layers in the places of the library's: linear layers, the embedding, and the head with the logits.

Legend: T = tokens, L = rows of logits, K = inputs of a layer, N = outputs, D = hidden size, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.base import DenseScheme, TensorSpec
from octavo.layers.vocabulary import Embedding, LogitsHead

INPUTS, OUTPUTS = ("rowwise", "rowwise_split_input"), ("colwise", "colwise_gather_output")  # what a plan shards


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer and nothing else."""
    return type(module) is nn.Linear or type(module).__name__ in ("FalconLinear", "Conv1D")


class FallbackLinear(MergedLinear):
    """In the place of a `torch.nn.Linear`, or of GPT-2's with a weight [K, N]: inputs of any number of dimensions."""

    def __init__(self, original: Any, context: BuildContext, style: str | None = None) -> None:
        self._group, self._style = context.groups.tensor, style
        self.out_features, self.in_features = original.weight.shape
        self._is_turned = type(original).__name__ == "Conv1D"
        if self._is_turned:
            self.in_features, self.out_features = original.weight.shape
        rank, size = self._group.rank, self._group.size
        inputs, outputs = Share.whole(self.in_features), Share.whole(self.out_features)
        if style in INPUTS:
            inputs = Share.of(self.in_features, rank, size)
        if style in OUTPUTS:
            outputs = Share.of(self.out_features, rank, size)
        self._sizes_of_ranks = [Share.of(self.out_features, each, size).size for each in range(size)]
        super().__init__(inputs, {"": outputs}, has_bias=original.bias is not None, context=context)
        self._is_turned &= isinstance(self.scheme, DenseScheme) and self.scheme.stored is None

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        specs = super().checkpoint_tensors()
        return specs | {"weight": TensorSpec((self.in_features, self.out_features))} if self._is_turned else specs

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.T if self._is_turned and name == "weight" else tensor)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().shard_of({**tensors, "weight": tensors["weight"].T} if self._is_turned else tensors)

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype, which some models look at: without values, as those are packed."""
        return torch.empty(self.out_features, self.in_features, dtype=self._context.dtype, device="meta")

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to x [..., K], or this rank's part of K: [..., N], or this rank's part of N."""
        rows = x.reshape(-1, x.shape[-1])  # [T, K]
        if self._style == "rowwise_split_input":
            rows = rows[:, self.inputs.start : self.inputs.stop]
        out = super().forward(rows.contiguous(), adapter_ids)
        if self._style in INPUTS:
            out = self._group.all_reduce(out)
        elif self._style == "colwise_gather_output":
            out = self._group.all_gather(out, self._sizes_of_ranks)
        return out.view(*x.shape[:-1], -1)


class FallbackEmbedding(nn.Module):
    """In the place of the embedding of a model with a tied head, which has the weights in memory once.

    Embeddings of some classes are scaled.
    """

    def __init__(self, original: nn.Embedding, context: BuildContext) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.rows = Embedding(self.num_embeddings, self.embedding_dim, context=context, has_tied_head=True)
        self._dtype, scale = context.dtype, getattr(original, "embed_scale", None)
        self._scale = None if scale is None else torch.as_tensor(scale).to(context.dtype).item()

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype, without values."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._dtype, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [1, T]: [1, T, D]."""
        rows: torch.Tensor = self.rows(ids.flatten()).view(*ids.shape, -1)
        return rows if self._scale is None else rows * self._scale


class FallbackHead(LogitsHead):
    """In the place of the last linear layer: hidden states [1, L, D] to logits [1, L, V] float32."""

    def __init__(self, original: nn.Linear, tied_to: Embedding | None, context: BuildContext) -> None:
        sizes, has_bias = (original.in_features, original.out_features), original.bias is not None
        super().__init__(*sizes, tied_to=tied_to, context=context, has_bias=has_bias)
        self._dtype, self._shape = context.dtype, sizes[::-1]

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype, without values."""
        return torch.empty(self._shape, dtype=self._dtype, device="meta")

    def forward(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits."""
        return super().forward(hidden[0].contiguous(), adapter_ids)[None]
