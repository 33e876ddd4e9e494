"""`WeightScheme`: the format of a linear layer's weight in a checkpoint, and the format it is computed in.

A layer requests its scheme when it is built, by its name in the checkpoint. Schemes are values: layers with equal
schemes have weights that can be stacked.

Legend: N = outputs, K = inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.distributed.shares import Share
from octavo.kernels.quantization import LowBitWeight, Quantization, WeightFormat
from octavo.kernels.types import LinearRole

Weight = torch.Tensor | LowBitWeight  # [N, K], dense or low-bit


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    is_integer: bool = False
    is_required: bool = True
    is_float8: bool = False
    other_shapes: tuple[tuple[int, ...], ...] = ()  # that files of some programs have instead


class WeightScheme(ABC):
    """The scheme of one weight [N, K]. `form` is the format that kernels compute with, None: dense."""

    form: WeightFormat | None

    @property
    def selects_columns(self) -> bool:
        """Whether the layer may bring its inputs into the order of the weight's columns, if that has one."""
        return True

    @property
    @abstractmethod
    def name(self) -> str:
        """A readable name."""

    @property
    def family(self) -> object:
        """What the linears of all experts of a layer must have in common."""
        return self

    def merged(self, parts: Sequence["WeightScheme"]) -> "WeightScheme | None":
        """Return the scheme of a layer that merges parts with these schemes, this one among them; None: none can."""
        return self if all(part == self for part in parts) else None

    def part(self, index: int) -> "WeightScheme":
        """Return the scheme of a part of a merged layer."""
        return self

    @abstractmethod
    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        """Return the checkpoint tensors of a whole weight, by name suffix."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> Weight:
        """Take a rank's shard out of the tensors of a whole weight, reading no more of them than that.

        Raises:
            CheckpointError: inconsistent tensors.
        """

    def form_of(self, inputs: Share) -> WeightFormat | None:
        """Return the format of a shard of the inputs."""
        return self.form

    def packed_form(self, outputs: Sequence[int], inputs: Share) -> WeightFormat | None:
        """Return the format of a merged layer whose parts have so many outputs, of a shard of the inputs."""
        return self.form_of(inputs)

    def merged_bytes(self, outputs: Sequence[int], in_size: int, dtype: torch.dtype) -> int:
        """Return the size in memory of a merged layer whose parts have so many outputs; `dtype` is the model's."""
        return self.num_bytes(sum(outputs), in_size, dtype)

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        """Return a weight's size in memory; `dtype` is the model's."""
        return (
            num_outputs * in_size * dtype.itemsize if self.form is None else self.form.num_bytes(num_outputs, in_size)
        )


@dataclass(frozen=True, slots=True)
class DenseScheme(WeightScheme):
    """A dense weight; with a form, it is quantized when packed."""

    form: WeightFormat | None = None

    @property
    def name(self) -> str:
        return "dense" if self.form is None else f"{self.form.bits} bits, quantized at load"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((num_outputs, in_size))}

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        return tensors["weight"][outputs.start : outputs.stop, inputs.start : inputs.stop]


class Schemes(Protocol):
    """The schemes of a model's layers."""

    @property
    def name(self) -> str:
        """The part of a numeric profile that names the schemes; empty if all weights are dense."""
        ...

    @property
    def forms(self) -> frozenset[WeightFormat | None]:
        """All formats that layers may have; None: dense."""
        ...

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        """Return the scheme of a linear layer, by its name in the checkpoint. Routers are always dense."""
        ...


DENSE = DenseScheme()


@dataclass(frozen=True, slots=True)
class QuantizedAtLoad:
    """Quantization at load time (`quantization=`) of a checkpoint with dense weights; None: they stay dense."""

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
