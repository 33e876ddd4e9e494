"""Qwen1.5 and Qwen2 MoE (Yang et al. 2024, arXiv:2407.10671), with a shared expert."""

from types import MappingProxyType

from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderForCausalLM
from octavo.models.moe import EXPERT_SPELLINGS, EXPERT_WEIGHT_NAMES


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2 with the names of its experts and of the shared one, which has its own gate."""

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
