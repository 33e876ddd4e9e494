"""`WeightOwner`: a layer with parameters. It knows what a checkpoint must bring, and what becomes of it."""

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

    Names are the owner's own: "weight", "bias", or "q.weight" where several checkpoint tensors share one parameter.
    `models/weights.py` calls these three, in this order.
    """

    _context: BuildContext

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        """Return every tensor that a checkpoint brings for this layer, on whatever ranks, by name."""

    @property
    def num_weights(self) -> int:
        """How many weights this rank holds of the layer."""
        return sum(math.prod(spec.shape) for spec in self.checkpoint_tensors().values())

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""
        return self.num_weights * self._context.dtype.itemsize

    @property
    def layout(self) -> str:
        """Name what decides how weights are packed, apart from kernels and shapes."""
        return ""

    @abstractmethod
    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor of the shape that `checkpoint_tensors` gave; it stays unchanged until packed."""

    def process_weights_after_loading(self) -> None:
        """Bring the weights into the layout that the kernels read. Called once or more; acts once."""

    def packed_tensors(self) -> Mapping[str, torch.Tensor | TableInFile] | None:
        """Return all that this layer has after packing, by names of its own; None: it cannot be kept outside memory."""
        return None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what `packed_tensors` of the same layer once gave, in place of loading and packing."""
        raise TypeError(f"{type(self).__name__} keeps nothing outside memory, but was given {sorted(tensors)}")
