"""What the mixtures of experts of a rank have counted, in one place, so that a step reads them once."""

from typing import Self

import torch

from octavo.contracts.stats import ExpertLoad
from octavo.layers.moe import MixtureOfExperts
from octavo.models.interfaces import CausalLM


class ExpertLoads:
    """Gives each mixture a row of one table to count in. Made before steps are recorded: they name its memory."""

    def __init__(self, mixtures: list[MixtureOfExperts]) -> None:
        self._layers = [mixture.layer for mixture in mixtures]
        self._table = torch.stack([mixture.load for mixture in mixtures])  # [layers, experts] int64
        for mixture, row in zip(mixtures, self._table, strict=True):
            mixture.load = row

    @classmethod
    def of(cls, model: CausalLM) -> Self | None:
        """Return None where the model has no experts, or none on this stage."""
        mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        return cls(mixtures) if mixtures else None

    def totals(self) -> ExpertLoad:
        """Return what has been counted since the start."""
        return ExpertLoad(layers=self._layers, counts=self._table.cpu().numpy().tobytes())

    def reset(self) -> None:
        """Forget what has been counted."""
        self._table.zero_()
