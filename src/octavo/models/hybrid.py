"""Hybrids of linear and full attention: Qwen3-Next, Qwen3.5."""

from torch import nn

from octavo.config.layers import GatedDeltaSpec
from octavo.layers.gated_delta import GatedDeltaMixer
from octavo.models.interfaces import CausalLM


class HybridForCausalLM(CausalLM):
    """Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer."""

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
