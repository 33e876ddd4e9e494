"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): norms before and after each branch, most layers with a window.

Layers with a window rotate by a table of their own. Norm weights are stored minus one, embeddings are scaled.
"""

from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.kernels.activation import hyperbolic_tangent
from octavo.kernels.types import Activation
from octavo.layers.attention import HeadNormWeights
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderAttention, DecoderForCausalLM, DecoderLayer

NORM_OFFSET = 1.0


class Gemma3Attention(DecoderAttention):
    """Attention with QK norm and a scale of its own; with a window, also with a rotary table of its own."""

    def build_head_norms(self, config: ModelConfig, context: BuildContext) -> HeadNormWeights:
        return HeadNormWeights(config.head_dim, config.rms_norm_eps, context=context, offset=NORM_OFFSET)

    def describe(self, config: ModelConfig, layer: int) -> AttentionLayer:
        rotary = int(config.sliding_windows[layer] is not None)
        return replace(super().describe(config, layer), scale=config.attention_scale, rotary=rotary)


class SandwichLayer(DecoderLayer):
    """A block whose branches also end with a norm."""

    def __init__(self, parts: DecoderLayer, post_attention_norm: RMSNorm, post_mlp_norm: RMSNorm) -> None:
        super().__init__(parts.attention_norm, parts.attention, parts.mlp_norm, parts.mlp)
        self.post_attention_norm, self.post_mlp_norm = post_attention_norm, post_mlp_norm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        x, residual = self.attention(self.attention_norm, x, residual, kv_cache, step)
        adapter_ids = step.adapter_ids_after(is_last=bool(self.attention.is_last))
        x, residual = self.mlp(self.mlp_norm, self.post_attention_norm(x), residual, adapter_ids)
        return self.post_mlp_norm(x), residual


class Gemma3ForCausalLM(DecoderForCausalLM):
    """The text model."""

    activation = Activation("gelu_tanh")
    norm_offset = NORM_OFFSET
    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            "model.layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.head_norms:query",
            "model.layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.head_norms:key",
            "model.layers.{layer}.post_attention_layernorm": "layers.{layer}.post_attention_norm",
            "model.layers.{layer}.pre_feedforward_layernorm": "layers.{layer}.mlp_norm",
            "model.layers.{layer}.post_feedforward_layernorm": "layers.{layer}.post_mlp_norm",
        }
    )

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        # Rounded to the dtype, as in training: in bfloat16 it is another number.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=context.dtype).item()

    def build_attention(self, layer: int) -> nn.Module:
        """Build the attention of block number `layer`."""
        return Gemma3Attention(self.config, layer, self.context)

    def build_layer(self, layer: int) -> nn.Module:
        """Build block number `layer`."""
        parts = super().build_layer(layer)
        assert isinstance(parts, DecoderLayer)
        return SandwichLayer(parts, self.build_norm(), self.build_norm())

    def build_rotary_tables(self) -> list[RotaryEmbedding]:
        """Make two tables: of layers that see the whole context, and of those with a window."""
        config = self.config
        assert config.local_rope is not None, f"{config.architecture} has rotary settings of its own for windows"
        local = RotaryEmbedding(config.local_rope, config.head_dim, config.max_model_len, device=self.context.device)
        return [*super().build_rotary_tables(), local]

    def embed_tokens(self, ids: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the scaled embeddings [T, D] of token ids [T]."""
        return super().embed_tokens(ids, adapter_ids) * self._embedding_scale

    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """See `CausalLM.compute_logits`."""
        logits, cap = super().compute_logits(hidden, adapter_ids), self.config.logits_soft_cap
        return logits if cap is None else hyperbolic_tangent(logits / cap) * cap

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CausalLM.logits_argmax`. A cap can make distinct logits equal, so with one they are computed in full."""
        if self.config.logits_soft_cap is None:
            return super().logits_argmax(hidden, adapter_ids)
        values, ids = self.compute_logits(hidden, adapter_ids).max(-1)
        return values, ids
