"""`KeptWeight`: a layer with one tensor, which is computed with as it stands in the checkpoint."""

from collections.abc import Mapping

import torch

from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class KeptWeight(WeightOwner):
    """One `weight` in the context's dtype, whole on every rank."""

    def __init__(self, *shape: int, context: BuildContext) -> None:
        super().__init__()
        self._context = context
        self.weight = torch.empty(shape, dtype=context.dtype, device=context.device)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(tuple(self.weight.shape))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weight.copy_(tensors["weight"])
