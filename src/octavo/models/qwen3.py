"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Llama with QK norm, a norm over each head of queries and keys."""

from types import MappingProxyType

from torch import nn

from octavo.config.model import ModelConfig
from octavo.layers.attention import HeadNormWeights
from octavo.layers.context import BuildContext
from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderAttention, DecoderForCausalLM


class Qwen3Attention(DecoderAttention):
    """Attention with a norm over each head of queries and keys."""

    def build_head_norms(self, config: ModelConfig, context: BuildContext) -> HeadNormWeights:
        return HeadNormWeights(config.head_dim, config.rms_norm_eps, context=context)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: the family with its own attention, and two more norms in the checkpoint."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            "model.layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.head_norms:query",
            "model.layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.head_norms:key",
        }
    )

    def build_attention(self, layer: int) -> nn.Module:
        """Build the attention of block number `layer`."""
        return Qwen3Attention(self.config, layer, self.context)
