"""Token embedding. Legend: T = tokens, V = vocabulary of this rank, D = hidden size."""

import math
from collections.abc import Mapping

import torch

from octavo.distributed.shares import Share
from octavo.kernels.types import KeepsPacked, PackedLinear
from octavo.layers.adapted_vocabulary import EmbeddingAdapter, rows_by_adapter
from octavo.layers.block_table import BlockTable
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import DENSE, DenseScheme, TensorSpec
from octavo.layers.quant.gguf import BlockScheme
from octavo.layers.quant.packing import pack, pack_dense
from octavo.layers.table_in_file import TableInFile
from octavo.layers.weight_owner import WeightOwner


class Embedding(WeightOwner):
    """A table with one row per token id.

    With a tied logits head, the weights are in memory once, in the head's layout: rows are then read back from the
    packed weight, or directly from the checkpoint file.

    Each rank holds a range of ids; other ids count as zeros, and the ranks' rows are all-reduced.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, context: BuildContext, has_tied_head: bool = False
    ) -> None:
        super().__init__()
        self._context, self._group = context, context.groups.tensor
        self.ids = Share.of_features(vocab_size, self._group.rank, self._group.size)
        self._shape = (self.ids.size, hidden_size)
        self._has_tied_head = has_tied_head
        head, own = context.at("logits_head").scheme(("",), "logits"), context.at("embedding").scheme(("",), "logits")
        self._blocks = own if isinstance(own, BlockScheme) else None
        self._head = head if isinstance(head, DenseScheme) else self._blocks or DENSE  # tied: built from this table
        is_dense = self._head == DENSE  # low-bit weights cannot serve as the table
        self.is_packed = has_tied_head and is_dense and context.kernels.reads_packed_rows  # no separate table
        self._is_copied = has_tied_head and (context.kernels.packing_copies or not is_dense)  # for the head
        self._table: torch.Tensor | TableInFile | BlockTable | None = None  # [V, D]
        self.packed: PackedLinear | None = None  # the tied head's weight
        self.slots: dict[int, EmbeddingAdapter] = {}  # of adapters that change this layer

    @property
    def hidden_size(self) -> int:
        return self._shape[1]

    @property
    def bytes_in_file(self) -> int:
        """Size of the table if it stays in its file."""
        stored = self._table.stored if isinstance(self._table, BlockTable) else self._table
        return stored.nbytes if isinstance(stored, TableInFile) else 0

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return (self._blocks or DENSE).tensors(self.ids.total, self._shape[1])

    @property
    def num_weights(self) -> int:
        return math.prod(self._shape)

    @property
    def num_bytes(self) -> int:
        dtype = self._context.dtype
        of_table, of_head = (self._blocks or DENSE).num_bytes, self._head.num_bytes
        return of_table(*self._shape, dtype) + self._is_copied * of_head(*self._shape, dtype)

    @property
    def layout(self) -> str:
        return repr(self._head)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": tensors["weight"][self.ids.start : self.ids.stop]}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        if self._blocks is not None:
            self._load_blocks(tensor, self._blocks)
            return
        is_shard, context = len(tensor) == self.ids.size, self._context
        rows = tensor if is_shard else tensor[self.ids.start : self.ids.stop]
        if not self.is_packed:
            self._table = self._in_file(rows)
        if self._table is None and not self.is_packed:
            rows = self._table = torch.empty(self._shape, dtype=context.dtype, device=context.device).copy_(rows)
        if self._has_tied_head:  # as loaded, usually from a mapped file
            rows = rows.to(context.device, context.dtype)
            self.packed = pack_dense(context.kernels, rows, None, "logits", self._head.form)

    def _load_blocks(self, tensor: torch.Tensor, scheme: BlockScheme) -> None:
        self._table = self._stored(tensor[self.ids.start : self.ids.stop])
        if self._has_tied_head:
            weight = scheme.weight({"weight": tensor}, self.ids, Share.whole(self._shape[1]))
            packed = pack(self._context.kernels, weight, None, "logits", scheme, self._context.dtype)
            assert isinstance(packed, PackedLinear)
            self.packed = packed

    def packed_tensors(self) -> Mapping[str, torch.Tensor | TableInFile] | None:
        if self._table is not None:
            return {"weight": self._table.stored if isinstance(self._table, BlockTable) else self._table}
        kernels = self._context.kernels
        assert self.packed is not None, "not loaded"
        return kernels.packed_tensors(self.packed) if isinstance(kernels, KeepsPacked) else None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        if self.is_packed and isinstance(kernels, KeepsPacked):
            self.packed = kernels.adopt_linear(tensors, *self._shape, "logits")
        else:  # in place: only the rows looked up are read from a mapped file
            self._table = self._stored(tensors["weight"])

    def _stored(self, table: torch.Tensor) -> torch.Tensor | TableInFile | BlockTable:
        """Return a table [V, D] that stays as it is: in its file where that saves memory."""
        stored = self._in_file(table) or table
        return stored if self._blocks is None else BlockTable(stored, *self._blocks.kinds)

    def _in_file(self, table: torch.Tensor) -> TableInFile | None:
        """Return the table [V, D] as rows of its file, if it would otherwise duplicate the head's copy in memory.

        Blocks stay there, too: the few rows that a step looks up are dequantized then.
        """
        stays = self._is_copied or self._blocks is not None
        return TableInFile.from_mapped(table) if stays and self._context.device.type == "cpu" else None

    def forward(self, ids: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Look up ids [T] and return [T, D]."""
        if self.ids.is_whole:
            return self._adapted_rows(ids, adapter_ids)
        rows = self._adapted_rows((ids - self.ids.start).clamp(0, self.ids.size - 1), adapter_ids)
        is_elsewhere = (ids < self.ids.start) | (ids >= self.ids.stop)  # [T]
        return self._group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))

    def _adapted_rows(self, ids: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        rows = self._rows(ids)
        for tokens, adapter in rows_by_adapter(self.slots, adapter_ids):
            rows[tokens] = adapter.rows(ids[tokens], rows[tokens], self._context.kernels)
        return rows

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        kernels = self._context.kernels
        if isinstance(self._table, TableInFile | BlockTable):
            return self._table.rows(ids).to(self._context.dtype)
        if self._table is not None:
            return kernels.embedding(ids, self._table)
        assert self.packed is not None, "not loaded"
        return kernels.packed_rows(ids, self.packed, self._shape[1])
