"""What an attention backend is, and what it is told of a layer.

Legend: T = tokens of the step, H = query heads, G = kv heads, E = head size.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache

# A backend's own work list for one step, made once and shared by all layers. Opaque to everyone else.
PlanT = TypeVar("PlanT")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Norms over each head of queries and keys, taken before rotation; one weight for all heads of a kind."""

    query: torch.Tensor  # [E] float32
    key: torch.Tensor  # [E] float32
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionLayer:
    """What one layer's attention is, the same in every step. Each is equal to itself only."""

    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # E
    sliding_window: int | None  # position p sees p - sliding_window + 1 ... p; None: all up to p
    norms: HeadNorms | None = None
    scale: float | None = None  # the factor on products of queries and keys; None: 1 / sqrt(head_dim)
    kv_group: int = 0  # whose block table and slots are this layer's, see `ForwardBatch.of_group`
    computes_kept_only: bool = False  # only the answers to `ForwardBatch.kept_indices` are read; others may be anything

    @property
    def softmax_scale(self) -> float:
        """The factor on products of queries and keys."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What a token's key, or its value, takes in a layer's pool: `head_size` elements of `dtype` for each kv head.

    In what order they lie is the backend's own business, except that one block's are together, and blocks in a row.
    """

    head_size: int
    dtype: torch.dtype


class AttentionBackend(Protocol[PlanT]):
    """Causal attention of T new tokens over paged context.

    A backend writes all keys and values of the step before it reads any (see `ForwardBatch`).
    """

    name: str
    is_batch_invariant: (
        bool  # a token's result has the same bits whatever else is in the step, and however it is chunked
    )
    # One new token each for a number of requests takes the same launches whatever the tensors hold: then the batch's
    # `seq_lens_list` may be upper bounds, and nothing waits for the device.
    is_capturable: bool
    records_calls: bool  # a CPU's step can be recorded with it: `worker/graph.py`

    def kv_layout(self, head_dim: int) -> KVLayout:
        """Say what the pool must hold for heads of this size."""
        ...

    def plan(self, batch: ForwardBatch) -> PlanT:
        """Derive from the batch what every layer of its KV group needs."""
        ...

    def forward(
        self,
        qkv: torch.Tensor,  # [T, (H + 2 * G) * E], as projected: queries, keys, values
        cos: torch.Tensor,  # [T, E / 2] float32
        sin: torch.Tensor,  # [T, E / 2] float32
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        plan: PlanT,
        layer: AttentionLayer,
    ) -> torch.Tensor:  # [T, H * E]
        """Normalize and rotate queries and keys, store keys and values at `batch.slot_mapping`, then attend."""
        ...
