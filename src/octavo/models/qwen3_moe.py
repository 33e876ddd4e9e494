"""Qwen3 MoE (Yang et al. 2025, arXiv:2505.09388): experts in all layers except those the configuration excludes."""

from types import MappingProxyType

from octavo.models.moe import EXPERT_SPELLINGS, EXPERT_WEIGHT_NAMES
from octavo.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with the names of its experts; which layers have them is a setting (`ModelConfig.moe`)."""

    weight_names = MappingProxyType({**Qwen3ForCausalLM.weight_names, **EXPERT_WEIGHT_NAMES})
    other_spellings = EXPERT_SPELLINGS
