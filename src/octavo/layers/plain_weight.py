"""`PlainWeight`: a layer with one tensor that is used as the checkpoint has it."""

from collections.abc import Mapping

import torch

from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class PlainWeight(WeightOwner):
    """`weight`, in the context's dtype, whole on every rank. `name` is its last part in the checkpoint."""

    def __init__(self, *shape: int, context: BuildContext, name: str = "weight") -> None:
        super().__init__()
        self._context, self._name = context, name
        self.weight = torch.empty(shape, dtype=context.dtype, device=context.device)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {self._name: TensorSpec(tuple(self.weight.shape))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {self._name: self.weight}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weight.copy_(tensors[self._name])
