"""Muse Glimmer: embeddings are normalized, and the last norm is stored otherwise than those of layers.

Legend: T = tokens, D = hidden size.
"""

import torch

from octavo.attention.metadata import ForwardBatch
from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.models.interfaces import CausalLM


class MuseGlimmerForCausalLM(CausalLM):
    """The language model of Muse Glimmer."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._ones = torch.ones(config.hidden_size, dtype=self.context.dtype, device=self.context.device)

    def build_last_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, context=self.context)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = super().embed(batch)  # [T, D]
        return self.context.kernels.rms_norm(x, self._ones, self.config.rms_norm_eps)
