"""Granite 4, whose MLP is beside experts, or alone if there are none."""

from octavo.config.family import NameTable
from octavo.models.interfaces import CausalLM


class GraniteHybridForCausalLM(CausalLM):
    """A decoder with Mamba-2, and attention in some layers."""

    @property
    def weight_names(self) -> NameTable:
        names = super().weight_names
        if self.config.experts is not None:
            return names
        return {name: place.replace(".mlp.shared_expert.", ".mlp.") for name, place in names.items()}
