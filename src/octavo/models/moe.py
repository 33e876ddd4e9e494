"""How checkpoints name experts: one tensor per expert, or, since transformers 5, one stack per layer."""

from dataclasses import dataclass
from types import MappingProxyType

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}"
EXPERT_WEIGHT_NAMES = MappingProxyType(
    {
        "model.layers.{layer}.mlp.gate": "layers.{layer}.mlp.router:experts",
        f"{_EXPERT}.gate_proj": "layers.{layer}.mlp.experts.{expert}.gate_up:gate",
        f"{_EXPERT}.up_proj": "layers.{layer}.mlp.experts.{expert}.gate_up:up",
        f"{_EXPERT}.down_proj": "layers.{layer}.mlp.experts.{expert}.down",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedNames:
    """The names of a layer's stacks: gates and ups [experts, 2 * N, K], gates first; downs [experts, N, K]."""

    gate_up: str = "model.layers.{layer}.mlp.experts.gate_up_proj"
    down: str = "model.layers.{layer}.mlp.experts.down_proj"


STACKED_EXPERTS = StackedNames()
EXPERT_SPELLINGS = MappingProxyType(
    {
        STACKED_EXPERTS.gate_up: (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        STACKED_EXPERTS.down: (f"{_EXPERT}.down_proj.weight",),
    }
)
