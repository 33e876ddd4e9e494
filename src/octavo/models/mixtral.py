"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer."""

from types import MappingProxyType

from octavo.models.common import DECODER_WEIGHT_NAMES, DecoderForCausalLM
from octavo.models.moe import STACKED_EXPERTS

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral: the family with its own names for experts."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            "model.layers.{layer}.block_sparse_moe.gate": "layers.{layer}.mlp.router:experts",
            f"{_EXPERT}.w1": "layers.{layer}.mlp.experts.{expert}.gate_up:gate",
            f"{_EXPERT}.w3": "layers.{layer}.mlp.experts.{expert}.gate_up:up",
            f"{_EXPERT}.w2": "layers.{layer}.mlp.experts.{expert}.down",
        }
    )
    other_spellings = MappingProxyType(
        {
            "model.layers.{layer}.mlp.gate.weight": ("model.layers.{layer}.block_sparse_moe.gate.weight",),
            STACKED_EXPERTS.gate_up: (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
            STACKED_EXPERTS.down: (f"{_EXPERT}.w2.weight",),
        }
    )
