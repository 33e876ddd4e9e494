"""`StateMixer`: what layers have in common that mix the tokens of a request and keep a state.

Legend: T = tokens, W = tokens kept after the last layer, D = hidden size, M = what is mixed of a token, on this rank.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata
from octavo.kernels.states import StateStep, StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm


class StateMixer(nn.Module, ABC):
    """Projections, an op that reads and writes states, and a projection, `output`, which subclasses make."""

    output: Linear

    def __init__(self, *, kv_group: int, is_last: bool, context: BuildContext) -> None:
        super().__init__()
        self.is_last, self._kv_group, self._kernels = is_last, kv_group, context.kernels

    @abstractmethod
    def mix(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: StateStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (what is mixed of the sum [T, M], the sum)."""

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do so, and project what is mixed: [T, D]; last layer: [W, D]."""
        mixed, residual = self.mix(norm, x, residual, states, step.batch.state_step(self._kv_group))
        mixed, residual = step.rows_after(self._kernels, mixed, residual, is_last=self.is_last)
        return self.output(mixed), residual
