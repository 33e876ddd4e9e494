"""Qwen1.5 and Qwen2 with experts (Yang et al. 2024, arXiv:2407.10671), one of which every token has beside its own."""

from types import MappingProxyType

from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderForCausalLM
from octavo.models.moe import EXPERT_SPELLINGS, EXPERT_WEIGHT_NAMES


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2 with the names of experts and of the shared one, whose part a gate of its own decides."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            **EXPERT_WEIGHT_NAMES,
            "model.layers.{layer}.mlp.shared_expert_gate": "layers.{layer}.mlp.router:shared",
            "model.layers.{layer}.mlp.shared_expert.gate_proj": "layers.{layer}.mlp.shared_expert.gate_up:gate",
            "model.layers.{layer}.mlp.shared_expert.up_proj": "layers.{layer}.mlp.shared_expert.gate_up:up",
            "model.layers.{layer}.mlp.shared_expert.down_proj": "layers.{layer}.mlp.shared_expert.down",
        }
    )
    other_spellings = EXPERT_SPELLINGS
