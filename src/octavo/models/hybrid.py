"""Hybrids of linear and full attention: Qwen3-Next, Qwen3.5. Full attention has a gate on its result.

Legend: T = tokens, W = tokens kept after the last layer's attention, D = hidden size.
"""

from dataclasses import replace

import torch
from torch import nn

from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.layers import AttentionSpec, GatedDeltaSpec
from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.gated_delta import GatedDeltaMixer
from octavo.layers.linear import GatedQKVLinear
from octavo.layers.norm import RMSNorm
from octavo.models.common import DecoderAttention
from octavo.models.interfaces import CausalLM


class GatedAttention(DecoderAttention):
    """Attention whose result is multiplied by the sigmoid of a gate, which is projected with queries."""

    def build_qkv(self, in_size: int, spec: AttentionSpec, context: BuildContext) -> GatedQKVLinear:
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        return GatedQKVLinear(in_size, *heads, has_bias=spec.has_bias, context=context)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        projected, residual = self.qkv.of_normed(norm, x, residual, step.adapter_ids)
        gate_size = self.qkv.parts["gate"].size
        qkv, gates = projected[:, :-gate_size], projected[:, -gate_size:]
        attended = self._kernels.gate(self.backend.forward(qkv, kv_cache, step, self.layer), gates)
        if self.is_last:
            kept = step.batch.kept_indices
            attended, residual = (self._kernels.kept_rows(rows, kept) for rows in (attended, residual))
        return self.out(attended, step.adapter_ids_after(is_last=self.is_last)), residual

    def describe(self, config: ModelConfig, layer: int) -> AttentionLayer:
        described = super().describe(config, layer)
        return replace(described, gate_heads=described.num_heads)


class HybridForCausalLM(CausalLM):
    """Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer."""

    attention_class = GatedAttention

    def build_attention(self, layer: int) -> nn.Module:
        mixer = self.config.layers[layer].mixer
        if not isinstance(mixer, GatedDeltaSpec):
            return super().build_attention(layer)
        return GatedDeltaMixer(
            mixer,
            self.config.hidden_size,
            self.config.rms_norm_eps,
            kv_group=self.config.kv_group_of(layer),
            is_last=layer == self.config.num_layers - 1,
            context=self.context.at(f"layers.{layer}.attention"),
        )
