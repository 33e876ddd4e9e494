"""Mixtures of experts: Mixtral, and those of Qwen. They differ from their dense kin in the names of weights alone.

A checkpoint has one tensor per expert, or, since transformers 5, one stack per layer: gates and ups [experts, 2 * N,
K], gates first; downs [experts, N, K]. Which layers have experts is a setting (`LayerSpec.feed_forward`).
"""

from types import MappingProxyType

from octavo.models.common import DECODER_WEIGHT_NAMES
from octavo.models.interfaces import CausalLM
from octavo.models.llama import Qwen3ForCausalLM

_MLP = "model.layers.{layer}.mlp"
_STACKED_GATE_UP, _STACKED_DOWN = f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj"
_EXPERT, _MIXTRAL_EXPERT = f"{_MLP}.experts.{{expert}}", "model.layers.{layer}.block_sparse_moe.experts.{expert}"
_PLACE = "layers.{layer}.mlp"


def _expert_names(router: str, expert: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {
        router: f"{_PLACE}.router:experts",
        f"{expert}.{gate}": f"{_PLACE}.experts.{{expert}}.gate_up:gate",
        f"{expert}.{up}": f"{_PLACE}.experts.{{expert}}.gate_up:up",
        f"{expert}.{down}": f"{_PLACE}.experts.{{expert}}.down",
    }


_QWEN_NAMES = MappingProxyType(_expert_names(f"{_MLP}.gate", _EXPERT, "gate_proj", "up_proj", "down_proj"))
_QWEN_SPELLINGS = MappingProxyType(
    {
        _STACKED_GATE_UP: (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        _STACKED_DOWN: (f"{_EXPERT}.down_proj.weight",),
    }
)
_MIXTRAL_NAMES = _expert_names("model.layers.{layer}.block_sparse_moe.gate", _MIXTRAL_EXPERT, "w1", "w3", "w2")


class MixtralForCausalLM(CausalLM):
    """Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer."""

    weight_names = MappingProxyType({**DECODER_WEIGHT_NAMES, **_MIXTRAL_NAMES})
    other_spellings = MappingProxyType(
        {
            f"{_MLP}.gate.weight": ("model.layers.{layer}.block_sparse_moe.gate.weight",),
            _STACKED_GATE_UP: (f"{_MIXTRAL_EXPERT}.w1.weight", f"{_MIXTRAL_EXPERT}.w3.weight"),
            _STACKED_DOWN: (f"{_MIXTRAL_EXPERT}.w2.weight",),
        }
    )


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen1.5 and Qwen2 MoE (Yang et al. 2024, arXiv:2407.10671), with a shared expert that has its own gate."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            **_QWEN_NAMES,
            f"{_MLP}.shared_expert_gate": f"{_PLACE}.router:shared",
            f"{_MLP}.shared_expert.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
            f"{_MLP}.shared_expert.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
            f"{_MLP}.shared_expert.down_proj": f"{_PLACE}.shared_expert.down",
        }
    )
    other_spellings = _QWEN_SPELLINGS


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 MoE (Yang et al. 2025, arXiv:2505.09388)."""

    weight_names = MappingProxyType({**Qwen3ForCausalLM.weight_names, **_QWEN_NAMES})
    other_spellings = _QWEN_SPELLINGS
