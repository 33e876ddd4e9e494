"""A model of tests, whose layers attend in every way there is: Qwen3 with sinks, caps, and rotation layer by layer."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import TINY_MODELS

from octavo.config import families
from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.interfaces import CausalLM

CASE = next(case for case in TINY_MODELS if case.name == "qwen3-mixed-windows")  # windows in layers 0 and 2 of 3
_QWEN3 = families.FAMILIES["Qwen3ForCausalLM"]
FAMILY = replace(
    _QWEN3,
    model=f"{__name__}:MixedForCausalLM",
    weight_names={**_QWEN3.weight_names, "model.layers.{layer}.self_attn": "layers.{layer}.attention.sinks"},
)


class MixedForCausalLM(CausalLM):
    """Qwen3's family, computed otherwise."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        layers = tuple(
            layer.with_attention(has_sinks=True, scale=0.4, rotary=rotary, soft_cap=soft_cap)
            for layer, rotary, soft_cap in zip(config.layers, (1, None, 0), (None, 2.5, 2.5), strict=True)
        )
        super().__init__(replace(config, layers=layers), context)

    def build_rotary_tables(self) -> list[RotaryEmbedding]:
        rope = replace(self.config.rotary[0].rope, theta=50.0)
        partial = RotaryEmbedding(rope, 6, self.config.max_model_len, device=self.context.device)
        return [*super().build_rotary_tables(), partial]


def save_mixed(folder: Path) -> None:
    """Save a checkpoint that has sinks, too."""
    CASE.save(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.linspace(-1.0, 3.0 - layer, 6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
