"""`quantization=` for checkpoints in 8-bit floats: weights are expanded and quantized again when a layer is packed.

On CPUs, which have no kernels for such floats, that is what makes them small and fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.distributed.shares import Share
from octavo.kernels.quantization import QuantizedWeight, WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import QuantizedAtLoad, Schemes, TensorSpec, WeightScheme
from octavo.layers.quant.float8 import Float8Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class RequantizedScheme(WeightScheme):
    """Stored as 8-bit floats, computed in `form`."""

    stored: Float8Scheme
    form: WeightFormat | None

    @property
    def name(self) -> str:
        return f"{self.stored.name}, quantized again at load"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        return self.stored.tensors(num_outputs, in_size)

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        weight = self.stored.weight(tensors, outputs, inputs)
        assert isinstance(weight, QuantizedWeight)
        return weight.dequantized()


@dataclass(frozen=True, slots=True)
class Requantized(QuantizedAtLoad):
    """See `Schemes`. Layers that the checkpoint leaves dense are quantized like those of a dense checkpoint."""

    stored: Schemes | None = None

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        stored = None if self.stored is None else self.stored.scheme_of(layer, role)
        made = QuantizedAtLoad.scheme_of(self, layer, role)
        return RequantizedScheme(stored=stored, form=made.form) if isinstance(stored, Float8Scheme) else made
