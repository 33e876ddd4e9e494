"""`WeightScheme`: the format of a linear layer's weight in a checkpoint, and the format it is computed in.

A layer requests its scheme when it is built, by its name in the checkpoint: one of `Schemes`, which are those of the
checkpoint, or of `quantization=` for dense weights. Layers with equal schemes have weights that can be stacked.

Legend: N = outputs, K = inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.distributed.groups import Share
from octavo.kernels.quantization import (
    Float8Format,
    Quantization,
    QuantizedWeight,
    Weight,
    WeightFormat,
)
from octavo.kernels.types import LinearRole


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
        """Take a rank's shard out of the tensors of a whole weight, reading no more of them than that."""

    def form_of(self, inputs: Share) -> WeightFormat | None:
        return self.form

    def packed_form(self, outputs: Sequence[int], inputs: Share) -> WeightFormat | None:
        """Return the format of a merged layer whose parts have so many outputs, of a shard of the inputs."""
        return self.form_of(inputs)

    def merged_bytes(self, outputs: Sequence[int], in_size: int, dtype: torch.dtype) -> int:
        """Return the size in memory of a merged layer whose parts have so many outputs; `dtype` is the model's."""
        return self.num_bytes(sum(outputs), in_size, dtype)

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        if self.form is None:
            return num_outputs * in_size * dtype.itemsize
        return self.form.num_bytes(num_outputs, in_size)


@dataclass(frozen=True, slots=True)
class DenseScheme(WeightScheme):
    """A dense weight; with a form, it is quantized when packed. It may be `stored` in another way, and is expanded."""

    form: WeightFormat | None = None
    stored: WeightScheme | None = None

    @property
    def name(self) -> str:
        if self.stored is not None:
            return f"{self.stored.name}, quantized again at load"
        return "dense" if self.form is None else f"{self.form.bits} bits, quantized at load"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        dense = {"weight": TensorSpec((num_outputs, in_size))}
        return dense if self.stored is None else self.stored.tensors(num_outputs, in_size)

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        if self.stored is None:
            return tensors["weight"][outputs.start : outputs.stop, inputs.start : inputs.stop]
        weight = self.stored.weight(tensors, outputs, inputs)
        assert isinstance(weight, QuantizedWeight)
        return weight.dequantized()


class Schemes(Protocol):
    """The schemes of a model's layers."""

    @property
    def name(self) -> str: ...  # the part of a numeric profile that names the schemes; empty if all weights are dense

    @property
    def forms(self) -> frozenset[WeightFormat | None]: ...  # all formats that layers may have; None: dense

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        """Return the scheme of a linear layer, by its name in the checkpoint. Routers are always dense."""
        ...


DENSE = DenseScheme()


@dataclass(frozen=True, slots=True)
class QuantizedAtLoad:
    """Quantization at load time (`quantization=`) of a checkpoint with dense weights; None: they stay dense.

    Those that it has `stored` in 8-bit floats are quantized again: on CPUs, which have no kernels for such floats, that
    is what makes them small and fast.
    """

    quantization: Quantization | None = None
    stored: Schemes | None = None

    @property
    def name(self) -> str:
        return self.quantization.name if self.quantization else ""

    @property
    def forms(self) -> frozenset[WeightFormat | None]:
        return frozenset({self.quantization.linear, self.quantization.logits} if self.quantization else {None})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        if self.quantization is None or role == "router":
            return DENSE
        stored = None if self.stored is None else self.stored.scheme_of(layer, role)
        is_again = stored is not None and isinstance(stored.form, Float8Format)
        form = self.quantization.logits if role == "logits" else self.quantization.linear
        return DenseScheme(form, stored if is_again else None)
