"""Token embedding. Legend: T = tokens, V = vocabulary of this rank, D = hidden size."""

from collections.abc import Mapping

import torch

from octavo.distributed.shares import Share
from octavo.kernels.dispatch import KeepsPacked, PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.weight_owner import WeightOwner


class Embedding(WeightOwner):
    """A table with one row per token id: plain, or packed as the logits head reads it that is tied to it.

    Each rank holds a range of ids; what it does not hold counts as zeros, and the ranks' rows are added.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, context: BuildContext, has_tied_head: bool = False
    ) -> None:
        super().__init__()
        self._context, self._group = context, context.groups.tensor
        self.ids = Share.of_features(vocab_size, self._group.rank, self._group.size)
        self._shape = (self.ids.size, hidden_size)
        self._is_packed = has_tied_head and context.kernels.reads_packed_rows
        self._table: torch.Tensor | None = None  # [V, D]
        self.packed: PackedLinear | None = None  # in place of the table, where kernels read rows of it

    @property
    def table(self) -> torch.Tensor:
        assert self._table is not None, "not loaded, or packed"
        return self._table

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.ids.total, self._shape[1])}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        rows, context = tensor[self.ids.start : self.ids.stop], self._context
        if self._is_packed:  # from where it is, usually a mapped file: it is in memory once
            self.packed = context.kernels.pack_logits_linear(rows.to(context.device, context.dtype), None)
        else:
            self._table = torch.empty(self._shape, dtype=context.dtype, device=context.device).copy_(rows)

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        if self.packed is None:
            return {"weight": self.table}
        kernels = self._context.kernels
        return kernels.packed_tensors(self.packed) if isinstance(kernels, KeepsPacked) else None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        if self._is_packed and isinstance(kernels, KeepsPacked):
            self.packed = kernels.adopt_linear(tensors, *self._shape, "logits")
        else:
            self._table = tensors["weight"]  # where it is: of a mapped file only the rows asked for are read

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [T] and return [T, D]."""
        if self.ids.is_whole:
            return self._rows(ids)
        rows = self._rows((ids - self.ids.start).clamp(0, self.ids.size - 1))
        is_elsewhere = (ids < self.ids.start) | (ids >= self.ids.stop)  # [T]
        return self._group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self._context.kernels.packed_rows(ids, self.packed, self._shape[1])
        return self._context.kernels.embedding(ids, self.table)
