"""Muse Glimmer: embeddings are normalized, and the last norm is stored otherwise than those of layers.

Legend: T = tokens, D = hidden size.
"""

import torch

from octavo.attention.metadata import ForwardBatch
from octavo.layers.norm import RMSNorm
from octavo.models.interfaces import CausalLM


class MuseGlimmerForCausalLM(CausalLM):
    """The language model of Muse Glimmer."""

    def build_last_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, context=self.context)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = super().embed(batch)  # [T, D]
        return self.context.kernels.rms_norm(x, torch.ones_like(x[0]), self.config.rms_norm_eps)
