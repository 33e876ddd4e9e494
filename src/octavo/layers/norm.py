"""Root mean square norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450). Legend: D = size normalized over."""

from dataclasses import replace

import torch
from torch.nn.functional import layer_norm

from octavo.kernels.types import SILU, Activation, Fused
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import PlainWeight, PlainWeights


class RMSNorm(PlainWeight):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, *, context: BuildContext, offset: float = 0.0) -> None:
        super().__init__(size, context=context)  # weight [D]
        self._kernels, self._eps, self._offset = context.kernels, eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]."""
        return self._kernels.rms_norm(x, self.weight, self._eps, self._offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [..., D] to the residual stream [..., D], if there is one; return (normalized sum, sum)."""
        return self._kernels.add_rms_norm(x, self.fused(residual))

    def fused(self, residual: torch.Tensor | None, activation: Activation = SILU) -> Fused:
        """Describe this norm, with the `residual` added before it and the `activation` after it, for a fused op."""
        return Fused(
            residual=residual,
            norm_weight=self.weight,
            eps=self._eps,
            norm_offset=self._offset,
            activation=activation,
        )


class CenteredNorm(RMSNorm):
    """A layer norm (arXiv:1607.06450) in the place of an RMS norm: the mean is subtracted first; with a bias or not."""

    def __init__(self, size: int, eps: float, *, context: BuildContext, offset: float = 0.0, has_bias: bool) -> None:
        super().__init__(size, eps, context=context, offset=offset)
        self._bias: torch.Tensor | None = None
        if has_bias:
            self._bias = self._tensors["bias"] = torch.empty_like(self.weight)  # [D]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.add_rms_norm(x, self.fused(None))[0]

    def fused(self, residual: torch.Tensor | None, activation: Activation = SILU) -> Fused:
        return replace(super().fused(residual, activation), is_centered=True, norm_bias=self._bias)


class NoNorm(RMSNorm):
    """In the place of a norm where a branch reads the residual stream as it is. Only its `add` is called."""

    def __init__(self, *, context: BuildContext) -> None:
        super().__init__(0, 0.0, context=context)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {}

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else self._kernels.scaled_sum(x, residual, 1.0)
        return total, total


class LayerNorm(PlainWeights):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, each row by itself."""

    def __init__(self, size: int, eps: float, *, context: BuildContext, has_bias: bool = True) -> None:
        weight, bias = (torch.empty(size, dtype=context.dtype, device=context.device) for _ in range(2))  # [D]
        super().__init__({"weight": weight, **({"bias": bias} if has_bias else {})}, context=context)
        self.weight, self.bias, self._eps = weight, bias if has_bias else None, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
