"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467). Legend: D = size normalised over."""

from collections.abc import Mapping

import torch

from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class RMSNorm(WeightOwner):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._kernels, self.eps = context, context.kernels, eps
        self.weight = torch.empty(size, dtype=context.dtype, device=context.device)  # [D]

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(tuple(self.weight.shape))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weight.copy_(tensors["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., D]."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [..., D] to the residual stream [..., D]; return (normalised sum, sum)."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)
