"""`WeightOwner`: a layer with parameters. It declares its checkpoint tensors, and loads and packs them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.table_in_file import TableInFile


class WeightOwner(nn.Module, ABC):
    """Parameters are plain tensors of the build context's dtype and device.

    Names are the owner's own: "weight", "bias", or "q.weight" if several checkpoint tensors share one parameter.
    `models/weights.py` calls the next three methods, in this order.
    """

    _context: BuildContext

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        """Return every checkpoint tensor of this layer, on all ranks, by name."""

    @property
    def num_weights(self) -> int:
        """The number of this layer's weights on this rank."""
        return sum(math.prod(spec.shape) for spec in self.checkpoint_tensors().values())

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.num_weights * self._context.dtype.itemsize

    @property
    def layout(self) -> str:
        """Identify everything that affects packing, apart from kernels and shapes."""
        return ""

    @abstractmethod
    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Accept one tensor, of the shape given by `checkpoint_tensors`; it stays unchanged until packed."""

    def process_weights_after_loading(self) -> None:
        """Convert the weights to the kernels' layout. Idempotent."""

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's shard of the checkpoint tensors of this layer, in a layout that no kernels define."""
        return dict(tensors)

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `shard_of` returned; KeyError or ValueError if for another layer or rank."""
        for name, tensor in tensors.items():
            self.load_weight(name, tensor)
        self.process_weights_after_loading()

    def packed_tensors(self) -> Mapping[str, torch.Tensor | TableInFile] | None:
        """Return everything this layer holds after packing, by name; None: it cannot be saved."""
        return None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore from the saved `packed_tensors` of the same layer, instead of loading and packing."""
        raise TypeError(f"{type(self).__name__} has no saved tensors, but was given {sorted(tensors)}")


class PlainWeights(WeightOwner):
    """Tensors that are used as the checkpoint has them, whole on every rank, by name."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._tensors = context, tensors

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name].copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)


class PlainWeight(PlainWeights):
    """One tensor, `weight`, in the context's dtype. `name` is its last part in the checkpoint."""

    def __init__(self, *shape: int, context: BuildContext, name: str = "weight") -> None:
        weight = torch.empty(shape, dtype=context.dtype, device=context.device)
        super().__init__({name: weight}, context=context)
        self.weight = weight
