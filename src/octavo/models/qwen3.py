"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Llama whose queries and keys are normalised head by head.

Legend: T = tokens, H = query heads, G = kv heads, E = head size.
"""

from types import MappingProxyType

import torch
from torch import nn

from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderAttention, DecoderForCausalLM


class Qwen3Attention(DecoderAttention):
    """Attention with a norm over each head of queries and keys; one weight for all heads of a kind."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__(config, layer, context)
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context=context)
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context=context)

    def normalise_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise query [T, H, E] and key [T, G, E] over E."""
        return self.query_norm(query), self.key_norm(key)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: the family with its own attention and the two norms in the checkpoint."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            "model.layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.query_norm",
            "model.layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.key_norm",
        }
    )

    def build_attention(self, layer: int) -> nn.Module:
        """Compose the attention of block number `layer`."""
        return Qwen3Attention(self.config, layer, self.context)
