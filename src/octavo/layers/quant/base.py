"""`WeightScheme`: how the weight of a linear layer lies in a checkpoint, and in which form it is computed with.

A layer asks for its scheme when it is built, by its name in the checkpoint. Schemes are values: layers with equal ones
have weights that can be stacked.

Legend: N = outputs, K = inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.distributed.shares import Share
from octavo.kernels.dispatch import LinearRole
from octavo.kernels.quantization import Quantization, QuantizedWeight, WeightFormat

Weight = torch.Tensor | QuantizedWeight  # [N, K], dense or in few bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a checkpoint brings."""

    shape: tuple[int, ...]
    is_integer: bool = False
    is_required: bool = True


class WeightScheme(ABC):
    """Of one weight [N, K]. `form` is what kernels are to compute with, None: dense."""

    form: WeightFormat | None

    @property
    @abstractmethod
    def name(self) -> str:
        """Say for people what it is."""

    @abstractmethod
    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        """Return what a checkpoint brings of a whole weight, by the endings of names."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> Weight:
        """Cut a rank's share out of the tensors of a whole weight, touching no more of them than that.

        Raises:
            CheckpointError: tensors that contradict one another.
        """

    def form_of(self, inputs: Share) -> WeightFormat | None:
        """Return the form of a share of the inputs."""
        return self.form

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        """Return what a weight takes in memory; `dtype` is the model's."""
        return (
            num_outputs * in_size * dtype.itemsize if self.form is None else self.form.num_bytes(num_outputs, in_size)
        )


@dataclass(frozen=True, slots=True)
class DenseScheme(WeightScheme):
    """A dense weight; with a form, it is brought into few bits when it is packed."""

    form: WeightFormat | None = None

    @property
    def name(self) -> str:
        return "dense" if self.form is None else f"{self.form.bits} bits, made at load"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((num_outputs, in_size))}

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        return tensors["weight"][outputs.start : outputs.stop, inputs.start : inputs.stop]


class Schemes(Protocol):
    """The schemes of a model's layers."""

    @property
    def name(self) -> str:
        """What of it belongs to a numeric profile; empty where all weights are dense."""
        ...

    @property
    def forms(self) -> frozenset[WeightFormat | None]:
        """All forms that layers may have; None: dense."""
        ...

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        """Return the scheme of a linear layer, by its name in the checkpoint. Routers are always dense."""
        ...


DENSE = DenseScheme()


@dataclass(frozen=True, slots=True)
class MadeAtLoad:
    """The schemes of `quantization=`, of a checkpoint whose weights are dense; None: they stay so."""

    quantization: Quantization | None = None

    @property
    def name(self) -> str:
        return self.quantization.name if self.quantization else ""

    @property
    def forms(self) -> frozenset[WeightFormat | None]:
        return frozenset({self.quantization.linear, self.quantization.logits} if self.quantization else {None})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        if self.quantization is None or role == "router":
            return DENSE
        return DenseScheme(self.quantization.logits if role == "logits" else self.quantization.linear)
