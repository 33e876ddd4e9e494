"""`WeightOwner`: a layer with parameters. It knows what a checkpoint must bring, and what becomes of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from octavo.layers.table_in_file import TableInFile


class WeightOwner(nn.Module, ABC):
    """Parameters are plain tensors of the build context's dtype and device.

    Names are the owner's own: "weight", "bias", or "q.weight" where several checkpoint tensors share one parameter.
    `models/weights.py` calls these three, in this order.
    """

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor that must be loaded, by name."""

    @abstractmethod
    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor of the shape that `weight_shapes` gave, of any dtype; it stays unchanged until packed."""

    def process_weights_after_loading(self) -> None:
        """Bring the weights into the layout that the kernels read. Called once or more; acts once."""

    def packed_tensors(self) -> Mapping[str, torch.Tensor | TableInFile] | None:
        """Return all that this layer has after packing, by names of its own; None: it cannot be kept outside memory."""
        return None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what `packed_tensors` of the same layer once gave, in place of loading and packing."""
        raise TypeError(f"{type(self).__name__} keeps nothing outside memory, but was given {sorted(tensors)}")
