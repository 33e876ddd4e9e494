"""Hybrids of attention and layers that keep a state: Qwen3-Next, Qwen3.5, LFM2 and 3, Granite 4.

Legend: T = tokens, W = tokens kept after the last layer's attention, D = hidden size.
"""

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.family import NameTable
from octavo.config.layers import AttentionSpec, GatedDeltaSpec, Mamba2Spec, Mixer, ShortConvSpec
from octavo.config.model import ModelConfig
from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.gated_delta import GatedDeltaMixer
from octavo.layers.linear import MergedLinear
from octavo.layers.mamba2 import Mamba2Mixer
from octavo.layers.norm import RMSNorm
from octavo.layers.short_conv import ShortConvMixer
from octavo.models.common import DecoderAttention
from octavo.models.interfaces import CausalLM


class HeadGatedAttention(DecoderAttention):
    """Attention each of whose heads is multiplied by the sigmoid of a gate."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__(config, layer, context)
        inputs, heads = Share.whole(self.num_inputs * config.hidden_size), self.qkv.heads.query
        own = context.at(f"layers.{layer}.attention.gates")
        self.gates = MergedLinear(inputs, {"": heads}, has_bias=False, context=own)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self._kernels.add_rms_norm(x, norm.fused(residual))
        qkv, gates = self.qkv(normed, step.adapter_ids), self.gates(normed)
        attended = self._kernels.gate(self.backend.forward(qkv, kv_cache, step, self.layer), gates)
        attended, residual = step.rows_after(self._kernels, attended, residual, is_last=self.is_last)
        return self.out(attended, step.adapter_ids_after(is_last=self.is_last)), residual


class HybridForCausalLM(CausalLM):
    """A decoder whose layers are, each for itself, what their specs say."""

    def build_attention(self, layer: int) -> nn.Module:
        mixer = self.config.layers[layer].mixer
        assert mixer is not None, f"layer {layer} mixes nothing"
        if isinstance(mixer, AttentionSpec):
            return (HeadGatedAttention if mixer.has_head_gate else DecoderAttention)(self.config, layer, self.context)
        is_last, context = layer == self.config.num_layers - 1, self.context.at(f"layers.{layer}.attention")
        return self.build_mixer(mixer, context, is_last=is_last)

    def build_mixer(self, mixer: Mixer, context: BuildContext, *, is_last: bool) -> nn.Module:
        """Build what keeps a state; `is_last`: only rows that are kept behind the last layer are left."""
        size, eps, kv_group = self.config.hidden_size, self.config.rms_norm_eps, self.config.kv_group_of_mixer(mixer)
        if isinstance(mixer, ShortConvSpec):
            return ShortConvMixer(mixer, size, kv_group=kv_group, is_last=is_last, context=context)
        if isinstance(mixer, Mamba2Spec):
            return Mamba2Mixer(mixer, size, eps, kv_group=kv_group, is_last=is_last, context=context)
        assert isinstance(mixer, GatedDeltaSpec), "other mixers attend"
        return GatedDeltaMixer(mixer, size, eps, kv_group=kv_group, is_last=is_last, context=context)


class GraniteHybridForCausalLM(HybridForCausalLM):
    """Granite 4, whose MLP is beside experts, or alone if there are none."""

    @property
    def weight_names(self) -> NameTable:
        names = super().weight_names
        if self.config.experts is not None:
            return names
        return {name: place.replace(".mlp.shared_expert.", ".mlp.") for name, place in names.items()}
