"""Layer normalization (Ba et al. 2016, arXiv:1607.06450). Legend: D = size normalized over."""

from collections.abc import Mapping

import torch
from torch.nn.functional import layer_norm

from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class LayerNorm(WeightOwner):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, each row by itself."""

    def __init__(self, size: int, eps: float, *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._eps = context, eps
        self.weight = torch.empty(size, dtype=context.dtype, device=context.device)  # [D]
        self.bias = torch.empty_like(self.weight)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        shape = tuple(self.weight.shape)
        return {"weight": TensorSpec(shape), "bias": TensorSpec(shape)}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        (self.weight if name == "weight" else self.bias).copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.load_weight(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
