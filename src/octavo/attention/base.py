"""The interface of attention backends, and the description of a layer that they take.

Legend: T = tokens of the step, H = query heads, G = kv heads, E = head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from octavo.attention.encoder import EncoderSegments, SdpaSegments
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache, RotaryTable
from octavo.errors import UnsupportedModelError

# A backend's own work list for one step, built once and shared by all layers. Opaque to other code.
PlanT = TypeVar("PlanT")
AttentionFeature = Literal["soft_cap", "sinks"]  # fields of `AttentionLayer` that backends may lack


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Per-head norms of queries and keys, applied before rotation; one weight shared by all heads of a kind."""

    query: Tensor  # [E] float32
    key: Tensor  # [E] float32
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionLayer:
    """One layer's attention parameters, the same in every step. Compared by identity."""

    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # E
    sliding_window: int | None  # position p sees from p - sliding_window + 1 on; None: from 0 on
    norms: HeadNorms | None = None
    rotary: int | None = 0  # index into `AttentionMetadata.rotary`; None: no rotation
    scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scaled scores s become soft_cap * tanh(s / soft_cap) before masking
    sinks: Tensor | None = None  # [H] float32, one extra softmax logit per head, without a value
    kv_group: int = 0  # which block table and slots to use, see `ForwardBatch.of_group`
    computes_kept_only: bool = False  # only outputs at `ForwardBatch.kept_indices` are read; the rest are undefined
    index: int = 0  # in the model

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UnsupportedModelError: a soft cap that is not positive, or sinks of another dtype or number of heads.
        """
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise UnsupportedModelError(f"layer {self.index}: soft_cap={self.soft_cap}: must be above 0")
        if self.sinks is not None and (self.sinks.dtype, *self.sinks.shape) != (torch.float32, self.num_heads):
            what = f"{self.sinks.dtype} {list(self.sinks.shape)}"
            raise UnsupportedModelError(f"layer {self.index}: sinks={what}: must be float32 [{self.num_heads}]")

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The memory of a token's key, or value, in a layer's pool: `head_size` elements of `dtype` for each kv head.

    Their order is up to the backend, but each block is contiguous, and blocks follow one another.
    """

    head_size: int
    dtype: torch.dtype


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention of T new tokens over paged context.

    A backend writes all keys and values of the step before it reads any (see `ForwardBatch`).
    """

    name: str
    is_batch_invariant: bool  # a token's result has the same bits in any batch and with any chunking of its request
    # Launches of a pure decode step depend only on the number of requests, not on tensor contents: the batch's
    # `seq_lens_list` may then be upper bounds, and nothing synchronizes with the device.
    is_capturable: bool = False
    records_calls: bool = False  # supports recording CPU steps: `worker/graph.py`
    features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    @abstractmethod
    def kv_layout(self, head_dim: int) -> KVLayout:
        """Return the layout of the pool for heads of this size."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlanT:
        """Compute from the batch what all layers of its KV group share."""

    def check(self, layer: AttentionLayer) -> None:
        """Check that the backend supports the layer's features.

        Raises:
            UnsupportedModelError: it lacks one.
        """
        asked: dict[AttentionFeature, bool] = {"soft_cap": layer.soft_cap is not None, "sinks": layer.sinks is not None}
        if lacking := [name for name, is_asked in asked.items() if is_asked and name not in self.features]:
            raise UnsupportedModelError(
                f"layer {layer.index}: attention_backend={self.name} does not compute {' and '.join(lacking)}"
            )

    def forward(
        self,
        qkv: Tensor,  # [T, (H + 2 * G) * E], as projected: queries, keys, values
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
        layer: AttentionLayer,
    ) -> Tensor:  # [T, H * E]
        """Normalize and rotate queries and keys, store keys and values at the step's slots, then attend."""
        return self.attend(self.write_kv(qkv, kv_cache, step, layer), kv_cache, step, layer)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        """Normalize and rotate queries and keys, store keys and values; return queries [T, H, E].

        By default, the projection is returned as is: for backends whose `attend` does everything.
        """
        return qkv

    @abstractmethod
    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        """Return the attention output [T, H * E] of the queries returned by `write_kv`."""

    def of_segments(self, lengths: Sequence[int], rotary: RotaryTable | None) -> EncoderSegments:
        """Return the attention of an encoder's step, by torch's ops where the backend has none of its own.

        `lengths` are those of the segments, one after the other; `rotary` has a row for each of theirs. Nothing is
        stored, so `kv_cache_dtype` changes no bit of it.
        """
        return SdpaSegments(lengths, rotary)
