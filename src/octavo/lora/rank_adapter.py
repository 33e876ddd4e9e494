"""One adapter as one rank computes it: checked, scaled, merged and sharded like the rank's layers, on the host.

Legend: r = rank of this adapter in one layer, P = parts of a merged linear, K = its inputs and N its outputs on this
rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from octavo.layers.linear import MergedLinear


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """An adapter of one module, as in the file: it adds scale * up @ down @ x to the module's output for x."""

    down: torch.Tensor  # [r, all inputs]
    up: torch.Tensor  # [all outputs, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


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
                of_outputs[index][: part.rank] = (part.up[share.start : share.stop].float() * part.scale).T
        return cls(down=down, up=up)

    @property
    def rank(self) -> int:
        return self.up.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.down, self.up


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAdapter:
    """All that a rank keeps of an adapter."""

    layers: Mapping[str, LayerAdapter]  # by the layer's path in the model; the others are unchanged

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.layers.values()))


def _tensors(adapters: Iterable[LayerAdapter]) -> Iterable[torch.Tensor]:
    return (tensor for adapter in adapters for tensor in adapter.tensors)
