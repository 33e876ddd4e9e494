"""An MLP without gates."""

import torch
from torch import nn

from octavo.kernels.types import Activation
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, UpLinear
from octavo.layers.norm import RMSNorm


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self, size: int, inner_size: int, *, has_bias: bool, context: BuildContext, activation: Activation
    ) -> None:
        super().__init__()
        self._kernels, self._activation = context.kernels, activation
        self.up = UpLinear(size, inner_size, has_bias=has_bias, context=context.at("up"))
        self.down = Linear(self.up.outputs, size, has_bias=has_bias, context=context.at("down"))

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (the MLP of the sum, the sum)."""
        if self.up.stands_alone(adapter_ids) or self.down.stands_alone(adapter_ids):
            normed, total = norm.add(x, residual)
            return self.of_normed(normed, adapter_ids), total
        fused = norm.fused(residual, self._activation)
        out, total = self._kernels.mlp(x, fused, self.up.packed, self.down.packed)
        return self.down.summed(out), total

    def of_normed(self, x: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        """Apply to x [T, D], behind the norm: [T, D]."""
        inner = self._kernels.activate(self.up(x, adapter_ids), self._activation)
        out: torch.Tensor = self.down(inner, adapter_ids)
        return out
