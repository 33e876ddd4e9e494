"""Linears that pooled vectors go through: few rows, kept dense in the model's dtype. Legend: N = vectors."""

import torch
from torch import nn

from octavo.config.model import DenseStep
from octavo.distributed.groups import Share
from octavo.kernels.reference import hyperbolic_tangent
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.norm import LayerNorm


class PooledStep(nn.Module):
    """A linear, perhaps an activation, perhaps a layer norm; whole on every rank."""

    def __init__(self, step: DenseStep, context: BuildContext) -> None:
        super().__init__()
        outputs = {"": Share.whole(step.out_size)}
        self._step, self._context = step, context
        self.linear = MergedLinear(
            Share.whole(step.in_size), outputs, has_bias=step.has_bias, context=context.at("linear")
        )
        self.norm: LayerNorm | None = None
        if step.norm_name:
            self.norm = LayerNorm(step.out_size, step.norm_eps, context=context, has_bias=step.has_norm_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x [N, in_size] float32: [N, out_size] float32."""
        out: torch.Tensor = self.linear(x.to(self._context.dtype))
        if self._step.activation == "gelu":
            out = self._context.kernels.gelu(out, "gelu")
        elif self._step.activation == "tanh":
            out = hyperbolic_tangent(out.float()).to(out.dtype)
        return (out if self.norm is None else self.norm(out)).float()
