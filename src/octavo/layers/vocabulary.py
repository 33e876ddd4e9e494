"""Both ends of a language model: from token ids to embeddings, and from hidden states to logits.

Adapters (LoRA) of these are rare and large, so they are stored per slot instead of in a pool.

Legend: T = tokens, L = rows that get logits, V = vocabulary of this rank, D = hidden size, r = rank of an adapter.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from octavo.distributed.groups import Share
from octavo.kernels.reference import Kernels, LoraAdapters
from octavo.kernels.types import PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.base import DENSE, DenseScheme, TensorSpec
from octavo.layers.quant.gguf import BlockScheme
from octavo.layers.quant.packing import pack
from octavo.layers.table_in_file import TableInFile
from octavo.layers.weight_owner import WeightOwner

# Rows at a time: limits temporaries to 128 * V values (39 MB in bf16 for V = 151,936).
_SLICE_ROWS = 128
_Adapter = TypeVar("_Adapter")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingAdapter:
    """How one adapter changes an embedding: by replacing the table, or by a low-rank addition."""

    table: torch.Tensor | None = None  # [V, D]
    down: torch.Tensor | None = None  # [V, r]
    up: torch.Tensor | None = None  # [r, D], scaled

    def to(self, device: torch.device) -> "EmbeddingAdapter":
        """Return a copy on a device, unless it is there."""
        tensors = (self.table, self.down, self.up)
        table, down, up = (None if tensor is None else tensor.to(device) for tensor in tensors)
        return EmbeddingAdapter(table=table, down=down, up=up)

    def rows(self, ids: torch.Tensor, base: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Return the embeddings [T, D] of ids [T]; `base` [T, D] are those without the adapter."""
        rows = base if self.table is None else self.table.index_select(0, ids)
        if self.down is None or self.up is None:
            return rows
        # The kernels define the product, so that a token's bits are its own: down is looked up, the identity follows.
        middle = self.down.index_select(0, ids)
        identity = torch.eye(len(self.up)).to(self.up)
        return kernels.add_lora(rows, middle, _single(identity, self.up), torch.zeros_like(ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsAdapter:
    """How one adapter changes a logits head: by replacing the weight, or by a low-rank addition."""

    weight: PackedLinear | None = None
    down: torch.Tensor | None = None  # [r, D]
    up: torch.Tensor | None = None  # [r, V], scaled

    def logits(self, hidden: torch.Tensor, base: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Return the logits [T, V] float32 of hidden [T, D]; `base` [T, V] are those without the adapter."""
        logits = base if self.weight is None else kernels.logits_linear(hidden, self.weight)
        if self.down is None or self.up is None:
            return logits
        ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        exact = kernels if logits.dtype == hidden.dtype else Kernels()  # logits are never rounded to the dtype
        return exact.add_lora(logits, hidden, _single(self.down, self.up), ids)


def rows_by_adapter(
    slots: Mapping[int, _Adapter], adapter_ids: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, _Adapter]]:
    """Yield the indices of tokens with an adapter in `slots`, and the adapter, one after the other."""
    if not slots or adapter_ids is None:
        return
    for slot in sorted(set(adapter_ids.tolist())):
        if slot in slots:
            yield (adapter_ids == slot).nonzero()[:, 0], slots[slot]


def _single(down: torch.Tensor, up: torch.Tensor) -> LoraAdapters:
    ranks = torch.full((1,), len(up), dtype=torch.int32, device=up.device)
    return LoraAdapters(down=down.unsqueeze(0), up=up.unsqueeze(0), parts=(up.shape[1],), ranks=ranks)


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
        is_own = isinstance(head, DenseScheme) and head.stored is None
        self._head = head if is_own else self._blocks or DENSE  # tied: built from this table
        is_dense = self._head == DENSE  # low-bit weights cannot serve as the table
        self.is_packed = has_tied_head and is_dense and context.kernels.reads_packed_rows  # no separate table
        self._is_copied = has_tied_head and (context.kernels.packing_copies or not is_dense)  # for the head
        self._table: torch.Tensor | TableInFile | None = None  # [V, D], or [V, bytes of a row] in a GGUF file's blocks
        self.packed: PackedLinear | None = None  # the tied head's weight
        self.slots: dict[int, EmbeddingAdapter] = {}  # of adapters that change this layer

    @property
    def hidden_size(self) -> int:
        return self._shape[1]

    @property
    def bytes_in_file(self) -> int:
        """Size of the table if it stays in its file."""
        return self._table.nbytes if isinstance(self._table, TableInFile) else 0

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
            self.packed = context.kernels.pack_linear(rows, None, "logits", self._head.form)

    def _load_blocks(self, tensor: torch.Tensor, scheme: BlockScheme) -> None:
        rows = tensor[self.ids.start : self.ids.stop]
        self._table = self._in_file(rows) or rows
        if self._has_tied_head:
            weight = scheme.weight({"weight": tensor}, self.ids, Share.whole(self._shape[1]))
            packed = pack(self._context.kernels, weight, None, "logits", scheme, self._context.dtype)
            assert isinstance(packed, PackedLinear)
            self.packed = packed

    def packed_tensors(self) -> Mapping[str, torch.Tensor | TableInFile] | None:
        if self._table is not None:
            return {"weight": self._table}
        kernels = self._context.kernels
        assert self.packed is not None, "not loaded"
        return None if kernels.layout is None else self.packed.packed_tensors()

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        if self.is_packed and kernels.layout is not None:
            self.packed = kernels.adopt_linear(tensors, self._shape, "logits")
        else:  # in place: only the rows looked up are read from a mapped file
            self._table = self._in_file(tensors["weight"]) or tensors["weight"]

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
        kernels, table = self._context.kernels, self._table
        if table is None:
            assert self.packed is not None, "not loaded"
            return kernels.packed_rows(ids, self.packed, self._shape[1])
        if self._blocks is not None:
            rows = table.rows(ids) if isinstance(table, TableInFile) else table.index_select(0, ids)
            return kernels.decoded_rows(rows, *self._blocks.kinds).to(self._context.dtype)
        if isinstance(table, TableInFile):
            return table.rows(ids).to(self._context.dtype)
        return table.index_select(0, ids)


class LogitsHead(MergedLinear):
    """The last linear layer. If tied, it shares the embedding's weights and has none in the checkpoint.

    Each rank computes a range of the vocabulary; logits are all-gathered, so that all ranks sample alike.
    """

    role = "logits"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_to: Embedding | None,
        context: BuildContext,
        has_bias: bool = False,
    ) -> None:
        self._group = context.groups.tensor
        ranges = [Share.of_features(vocab_size, rank, self._group.size) for rank in range(self._group.size)]
        parts = {"": ranges[self._group.rank]}
        super().__init__(Share.whole(hidden_size), parts, has_bias=has_bias, context=context)
        self._tied_to, self._vocab_size = tied_to, vocab_size
        self._first: PackedLinear | None = None  # a view of the weight's first outputs
        self._sizes_of_ranks = [ids.size for ids in ranges]  # per rank
        self.slots: dict[int, LogitsAdapter] = {}  # of adapters that change this layer

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {} if self._tied_to is not None else super().checkpoint_tensors()

    @property
    def num_weights(self) -> int:
        return 0 if self._tied_to is not None else super().num_weights

    @property
    def num_bytes(self) -> int:
        return 0 if self._tied_to is not None else super().num_bytes

    def process_weights_after_loading(self) -> None:
        if self._tied_to is None:
            super().process_weights_after_loading()
        elif self._packed is None:
            self._packed = self._tied_to.packed

    @property
    def _is_shared(self) -> bool:
        """Whether the embedding owns this head's packed weight."""
        return self._tied_to is not None and self._tied_to.is_packed

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        return {} if self._is_shared else super().packed_tensors()

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._is_shared:
            self.process_weights_after_loading()
        else:
            super().adopt_packed(tensors)

    def forward(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [L, V] of hidden [L, D], always float32."""
        if hidden.shape[0] <= _SLICE_ROWS:
            return self._forward_slice(hidden, adapter_ids)
        logits = hidden.new_empty(hidden.shape[0], self._vocab_size, dtype=torch.float32)
        for start in range(0, len(hidden), _SLICE_ROWS):
            rows = slice(start, start + _SLICE_ROWS)
            logits[rows] = self._forward_slice(hidden[rows], None if adapter_ids is None else adapter_ids[rows])
        return logits

    def argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None, num_first: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row of hidden [L, D], [L] float32, and the lowest id that has it, [L].

        With `num_first`, a multiple of 64, of so many first tokens alone; on several ranks or with adapters of all.
        """
        if self._group.size > 1 or any(rows_by_adapter(self.slots, adapter_ids)):
            values, ids = self(hidden, adapter_ids).max(-1)
            return values, ids
        kernels, hidden, packed = self._context.kernels, self.selected(hidden), self.packed
        if num_first is not None:
            if self._first is None or self._first.num_outputs != num_first:
                self._first = kernels.first_outputs(packed, num_first)
            packed = self._first
        if hidden.shape[0] <= _SLICE_ROWS:
            return kernels.logits_argmax(hidden, packed)
        parts = [kernels.logits_argmax(rows, packed) for rows in torch.split(hidden, _SLICE_ROWS)]
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])

    def _forward_slice(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        kernels = self._context.kernels
        logits = kernels.logits_linear(self.selected(hidden), self.packed)
        for rows, adapter in rows_by_adapter(self.slots, adapter_ids):
            logits[rows] = adapter.logits(hidden[rows], logits[rows], kernels)
        return self._group.all_gather(logits, self._sizes_of_ranks)
