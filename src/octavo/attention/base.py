"""What an attention backend is."""

from typing import Protocol, TypeVar

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache

# A backend's own work list for one step, made once and shared by all layers. Opaque to everyone else.
PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """Causal attention of T new tokens over paged context. Legend: H = query heads, G = kv heads, D = head size.

    A backend writes all keys and values of the step before it reads any (see `ForwardBatch`).
    """

    name: str
    is_row_invariant: bool  # a token's result has the same bits whatever else is in the step, and however it is chunked

    def plan(self, batch: ForwardBatch) -> PlanT:
        """Derive from the batch what every layer needs."""
        ...

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        plan: PlanT,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:  # [T, H, D]
        """Store key and value at `batch.slot_mapping`, then attend. Position p sees p - sliding_window + 1 ... p."""
        ...
