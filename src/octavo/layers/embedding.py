"""Token embedding. Legend: T = tokens, V = vocabulary of this rank, D = hidden size."""

from collections.abc import Mapping

import torch

from octavo.distributed.shares import Share
from octavo.layers.context import BuildContext
from octavo.layers.weight_owner import WeightOwner


class Embedding(WeightOwner):
    """A table with one row per token id. Its plain layout stays, as a logits head may be tied to it.

    Each rank holds a range of ids; what it does not hold counts as zeros, and the ranks' rows are added.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, context: BuildContext) -> None:
        super().__init__()
        self._kernels, self._group = context.kernels, context.groups.tensor
        self.ids = Share.of_features(vocab_size, self._group.rank, self._group.size)
        self.table = torch.empty(self.ids.size, hidden_size, dtype=context.dtype, device=context.device)  # [V, D]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.ids.total, self.table.shape[1])}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.table.copy_(tensor[self.ids.start : self.ids.stop])

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.table}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.table = tensors["weight"]  # as it is, where it is: of a mapped file only the rows asked for are read

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [T] and return [T, D]."""
        if self.ids.is_whole:
            return self._kernels.embedding(ids, self.table)
        rows = self._kernels.embedding((ids - self.ids.start).clamp(0, self.ids.size - 1), self.table)
        is_elsewhere = (ids < self.ids.start) | (ids >= self.ids.stop)  # [T]
        return self._group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))
