"""`WeightScheme`: the format of a linear layer's weight in a checkpoint, and the format it is computed in.

A layer requests its scheme when it is built, by its name in the checkpoint: one of `Schemes`, which are those of the
checkpoint, or of `quantization=` for dense weights. Layers with equal schemes have weights that can be stacked.

Legend: N = outputs, K = inputs.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

import torch

from octavo.config.model import CheckpointQuantization
from octavo.distributed.groups import Share
from octavo.errors import InvalidParameterError
from octavo.kernels.quantization import (
    Float8Format,
    Quantization,
    QuantizedWeight,
    Weight,
    WeightFormat,
    get_quantization,
)
from octavo.kernels.reference import Kernels
from octavo.kernels.types import LinearRole

logger = logging.getLogger(__name__)

# quant_method -> module and what makes the schemes of a configuration, imported on demand; `config/hf_quantization.py`
# lists the names.
CHECKPOINT_SCHEMES = MappingProxyType(
    {
        "awq": ("octavo.layers.quant.grouped", "read_awq"),
        "fbgemm_fp8": ("octavo.layers.quant.float8", "read_float8"),
        "fp8": ("octavo.layers.quant.float8", "read_float8"),
        "octavo": ("octavo.layers.quant.octavo", "OctavoSchemes"),
        "gptq": ("octavo.layers.quant.grouped", "GPTQSchemes"),
        "compressed-tensors": ("octavo.layers.quant.compressed_tensors", "CompressedTensorsSchemes"),
    }
)
_GGUF = ("octavo.layers.quant.gguf", "GgufSchemes")


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


def make_schemes(checkpoint: CheckpointQuantization | None, quantization: str | None = None) -> Schemes:
    """Return the schemes of a quantized checkpoint, those of `quantization=`, or of both: of 8-bit floats."""
    if checkpoint is None:
        return QuantizedAtLoad(get_quantization(quantization) if quantization else None)
    module, name = _GGUF if checkpoint.method == "gguf" else CHECKPOINT_SCHEMES[checkpoint.method]
    schemes: Schemes = getattr(import_module(module), name)(checkpoint.fields)
    if quantization is None or quantization == checkpoint.method == "gguf":
        return schemes
    return QuantizedAtLoad(get_quantization(quantization), schemes)


def resolve_schemes(
    checkpoint: CheckpointQuantization | None,
    quantization: str | None,
    kernels_for: Callable[[frozenset[WeightFormat | None]], Kernels],
    where: str,
) -> tuple[Schemes, Kernels]:
    """Return the schemes of a model and the kernels that compute them.

    Blocks of a GGUF file that no kernels here compute are dequantized at load, which a warning says.

    Raises:
        UnsupportedModelError: a setting of the checkpoint that Octavo does not support.
        InvalidParameterError: an unknown `quantization=`, or one that no kernels here compute.
    """
    schemes = make_schemes(checkpoint, quantization)
    kernels = kernels_for(schemes.forms)
    is_computed = all(kernels.computes(form) for form in schemes.forms if form is not None)
    if checkpoint is not None and checkpoint.method == "gguf" and not is_computed:
        limit = f"needs a CPU, bfloat16, and Octavo's C++ kernels built and not switched off; here it is {where}"
        if quantization == "gguf":
            raise InvalidParameterError("quantization", quantization, limit)
        why = "take the memory of dense weights: computing with their blocks"
        logger.warning("GGUF: tensors are dequantized at load and %s %s", why, limit)
        schemes = QuantizedAtLoad()
        kernels = kernels_for(schemes.forms)
    check_quantization_at_load(schemes, kernels, where)
    return schemes, kernels


def check_quantization_at_load(schemes: Schemes, kernels: Kernels, where: str) -> None:
    """Check that these kernels support `quantization=`: it is for speed, and dequantizing would not be faster.

    Raises:
        InvalidParameterError: they have no kernels for such weights.
    """
    if not isinstance(schemes, QuantizedAtLoad) or schemes.quantization is None:
        return
    if all(kernels.computes(form) for form in schemes.forms if form is not None):
        return
    limit = "needs a CPU, bfloat16, and Octavo's C++ kernels built and not switched off, or a GPU and Triton"
    if isinstance(schemes.quantization.linear, Float8Format):
        limit = "needs a GPU and Triton: a CPU has no kernels for 8-bit floats"
    raise InvalidParameterError("quantization", schemes.name, f"{limit}; here it is {where}")
