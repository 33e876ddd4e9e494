"""One adapter as one rank computes it: checked, scaled, merged and sharded like the rank's layers, on the host.

Legend: r = rank of this adapter in one layer, P = parts of a merged linear, K = its inputs and N its outputs on this
rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.kernels.types import PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.packing import pack_dense
from octavo.layers.vocabulary import EmbeddingAdapter, LogitsAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """An adapter of one module, as in the file: it adds scale * up @ down @ x to the module's output for x."""

    down: torch.Tensor  # [r, all inputs]
    up: torch.Tensor  # [all outputs, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def scaled_up(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [r, all outputs], with the scale."""
        return (self.up.float() * self.scale).T.to(dtype).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAdapter:
    """An adapter of one layer of a rank. Parts of lower ranks are padded with zeros."""

    down: torch.Tensor  # [P, r, K]
    up: torch.Tensor  # [r, N], scaled

    @classmethod
    def of(cls, layer: MergedLinear, parts: Mapping[str, LowRank], dtype: torch.dtype) -> "LayerAdapter":
        """Take this rank's shard of the adapters of a layer's `parts`; parts without one stay as they are."""
        rank = max(part.rank for part in parts.values())
        outputs = [share.size for share in layer.parts.values()]
        down = torch.zeros(len(outputs), rank, layer.inputs.size, dtype=dtype)
        up = torch.zeros(rank, sum(outputs), dtype=dtype)
        of_outputs = up.split_with_sizes(outputs, dim=1)
        for index, (name, share) in enumerate(layer.parts.items()):
            if (part := parts.get(name)) is not None:
                down[index, : part.rank] = part.down[:, layer.inputs.start : layer.inputs.stop]
                of_outputs[index][: part.rank] = part.scaled_up(dtype)[:, share.start : share.stop]
        return cls(down=down, up=up)

    @property
    def rank(self) -> int:
        return self.up.shape[0]


@dataclass(kw_only=True, slots=True)
class HeadAdapter:
    """An adapter of a logits head; see `LogitsAdapter`. Its weight is packed once, between steps."""

    weight: torch.Tensor | None = None  # [N, K]
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    _packed: PackedLinear | None = None

    def on_device(self, context: BuildContext) -> LogitsAdapter:
        """Return what the layer computes with."""
        if self.weight is not None:
            weight = self.weight.to(context.device)
            self._packed, self.weight = pack_dense(context.kernels, weight, None, "logits", None), None
        down, up = (None if tensor is None else tensor.to(context.device) for tensor in (self.down, self.up))
        return LogitsAdapter(weight=self._packed, down=down, up=up)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAdapter:
    """A rank's part of an adapter."""

    # By the layer's path in the model; the others are unchanged.
    layers: Mapping[str, LayerAdapter]
    embeddings: Mapping[str, EmbeddingAdapter]
    heads: Mapping[str, HeadAdapter]

    @property
    def vocabulary_bytes(self) -> int:
        """The size of its changes of embeddings and logits heads."""
        parts = [(each.table, each.down, each.up) for each in self.embeddings.values()]
        parts += [(each.weight, each.down, each.up) for each in self.heads.values()]
        return sum(tensor.nbytes for part in parts for tensor in part if tensor is not None)
