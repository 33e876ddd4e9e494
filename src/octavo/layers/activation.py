"""Activations. Legend: T = tokens, I = intermediate size."""

import torch
from torch import nn

from octavo.layers.context import BuildContext


class SiluAndMul(nn.Module):
    """The gate of SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up."""

    def __init__(self, *, context: BuildContext) -> None:
        super().__init__()
        self._kernels = context.kernels

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [T, 2 * I], gate first, to [T, I]."""
        return self._kernels.silu_and_mul(gate_up)
