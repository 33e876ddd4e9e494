"""Token embedding. Legend: T = tokens, V = vocabulary, D = hidden size."""

from collections.abc import Mapping

import torch

from octavo.layers.context import BuildContext
from octavo.layers.weight_owner import WeightOwner


class Embedding(WeightOwner):
    """A table with one row per token id. Its plain layout stays, as a logits head may be tied to it."""

    def __init__(self, vocab_size: int, hidden_size: int, *, context: BuildContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.table = torch.empty(vocab_size, hidden_size, dtype=context.dtype, device=context.device)  # [V, D]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.table.shape)}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.table.copy_(tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.table}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.table = tensors["weight"]  # as it is, where it is: of a mapped file only the rows asked for are read

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [T] and return [T, D]."""
        return self._kernels.embedding(ids, self.table)
