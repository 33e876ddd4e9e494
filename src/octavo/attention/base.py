"""What an attention backend is, and what it is told of a layer.

Legend: T = tokens of the step, H = query heads, G = kv heads, E = head size.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import torch

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.errors import UnsupportedModelError

# A backend's own work list for one step, made once and shared by all layers. Opaque to everyone else.
PlanT = TypeVar("PlanT")
AttentionFeature = Literal["soft_cap", "sinks"]  # fields of `AttentionLayer` that not every backend must know


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
    rotary: int | None = 0  # which table of `AttentionMetadata.rotary` turns queries and keys; None: none does
    scale: float | None = None  # the factor on products of queries and keys; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scaled scores s become soft_cap * tanh(s / soft_cap) before any are masked
    sinks: torch.Tensor | None = None  # [H] float32, one more logit of each head in its softmax, which has no value
    kv_group: int = 0  # whose block table and slots are this layer's, see `ForwardBatch.of_group`
    computes_kept_only: bool = False  # only the answers to `ForwardBatch.kept_indices` are read; others may be anything
    index: int = 0  # in the model

    def __post_init__(self) -> None:
        """Check what a model says of itself.

        Raises:
            UnsupportedModelError: a cap that is none, or sinks of other heads.
        """
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise UnsupportedModelError(f"layer {self.index}: soft_cap={self.soft_cap}: must be above 0")
        if self.sinks is not None and (self.sinks.dtype, *self.sinks.shape) != (torch.float32, self.num_heads):
            what = f"{self.sinks.dtype} {list(self.sinks.shape)}"
            raise UnsupportedModelError(f"layer {self.index}: sinks={what}: must be float32 [{self.num_heads}]")

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


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention of T new tokens over paged context.

    A backend writes all keys and values of the step before it reads any (see `ForwardBatch`).
    """

    name: str
    is_batch_invariant: bool  # a token's result has the same bits in any batch, and however its request is chunked
    # One new token each for a number of requests takes the same launches whatever the tensors hold: then the batch's
    # `seq_lens_list` may be upper bounds, and nothing waits for the device.
    is_capturable: bool = False
    records_calls: bool = False  # a CPU's step can be recorded with it: `worker/graph.py`
    features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    @abstractmethod
    def kv_layout(self, head_dim: int) -> KVLayout:
        """Say what the pool must hold for heads of this size."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlanT:
        """Derive from the batch what every layer of its KV group needs."""

    def check(self, layer: AttentionLayer) -> None:
        """Say whether the backend computes what the layer is.

        Raises:
            UnsupportedModelError: it lacks a feature.
        """
        asked: dict[AttentionFeature, bool] = {
            "soft_cap": layer.soft_cap is not None,
            "sinks": layer.sinks is not None,
        }
        if lacking := [name for name, is_asked in asked.items() if is_asked and name not in self.features]:
            raise UnsupportedModelError(
                f"layer {layer.index}: attention_backend={self.name} does not compute {' and '.join(lacking)}"
            )

    def forward(
        self,
        qkv: torch.Tensor,  # [T, (H + 2 * G) * E], as projected: queries, keys, values
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
        layer: AttentionLayer,
    ) -> torch.Tensor:  # [T, H * E]
        """Normalize and rotate queries and keys, store keys and values at the step's slots, then attend."""
        return self.attend(self.write_kv(qkv, kv_cache, step, layer), kv_cache, step, layer)

    def write_kv(
        self, qkv: torch.Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values; return queries [T, H, E].

        A backend whose `attend` does all of it takes the projection as it is.
        """
        return qkv

    @abstractmethod
    def attend(
        self, query: torch.Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer
    ) -> torch.Tensor:
        """Return what the queries of `write_kv` find in their contexts, [T, H * E]."""
