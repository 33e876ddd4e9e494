"""Adapters of embeddings and logits heads: rare and large, so they are stored per slot instead of in a pool.

Legend: T = tokens, V = vocabulary of this rank, D = hidden size, r = rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from octavo.kernels.reference import Kernels
from octavo.kernels.types import LoraAdapters, PackedLinear


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
        rows = base if self.table is None else kernels.embedding(ids, self.table)
        if self.down is None or self.up is None:
            return rows
        # The kernels define the product, so that a token's bits are its own: down is looked up, the identity follows.
        middle = kernels.embedding(ids, self.down)
        return kernels.add_lora(
            rows, middle, _single(torch.eye(len(self.up)).to(self.up), self.up), torch.zeros_like(ids)
        )


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


_Adapter = TypeVar("_Adapter")


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
