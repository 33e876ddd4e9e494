"""The expert load counters of all mixtures of a rank in one table, so that a step reads them once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch

from octavo.contracts.engine import ExpertLoad
from octavo.device.base import DeviceQueue
from octavo.layers.moe import MixtureOfExperts
from octavo.models.interfaces import CausalLM


class ExpertLoads:
    """Gives each mixture a row of one table to count in. Created before steps are recorded: they hold its address."""

    def __init__(self, mixtures: list[MixtureOfExperts]) -> None:
        self._mixtures = mixtures
        self._layers = [mixture.layer for mixture in mixtures]
        self._table = torch.stack([mixture.load for mixture in mixtures])  # [layers, experts] int64
        for mixture, row in zip(mixtures, self._table, strict=True):
            mixture.load = row

    @classmethod
    def of(cls, model: CausalLM) -> Self | None:
        """Return None if the model has no experts, or none on this stage."""
        mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        return cls(mixtures) if mixtures else None

    def totals(self) -> ExpertLoad:
        """Return the counts since the start."""
        return ExpertLoad(layers=self._layers, counts=self._table.cpu().numpy().tobytes())

    def begin_totals(self, queue: DeviceQueue) -> Callable[[], ExpertLoad]:
        """Enqueue a copy of the counts; return a function that waits for it."""
        host = queue.host_bytes(self._table.nbytes)
        host.copy_(self._table.view(torch.uint8).flatten(), non_blocking=True)
        wait = queue.mark()

        def totals() -> ExpertLoad:
            wait()
            return ExpertLoad(layers=self._layers, counts=host.numpy().tobytes())

        return totals

    @contextmanager
    def counting(self, is_counted: torch.Tensor) -> Iterator[None]:
        """Count only tokens where `is_counted` [T] int64 is 1, in a step launched inside this context."""
        for mixture in self._mixtures:
            mixture.is_counted = is_counted
        try:
            yield
        finally:
            for mixture in self._mixtures:
                mixture.is_counted = None

    def reset(self) -> None:
        """Reset the counts to zero."""
        self._table.zero_()
