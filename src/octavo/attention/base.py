"""The interface of attention backends, the description of a layer that they take, and what those in torch share.

Attention of encoders is bidirectional within each segment, and nothing is cached between steps.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, C = context positions; of
encoders: P = rows of all segments, one segment after the other, S = segments.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache, RotaryTable
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import Kernels

# A backend's own work list for one step, built once and shared by all layers. Opaque to other code.
PlanT = TypeVar("PlanT")
# Of `AttentionLayer`, what backends may lack.
AttentionFeature = Literal["soft_cap", "sinks", "value_norm", "kv_sharing", "latent", "chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Per-head norms of queries and keys; one weight shared by all heads of a kind."""

    query: Tensor  # [E] float32
    key: Tensor  # [E] float32
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """How a token's one vector [E] becomes its key and, at the front, its value [V]: `LatentSpec`."""

    value_size: int  # V: elements that are normalized; the others are rotated, as are those of queries
    norm: Tensor  # [V] float32
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionLayer:
    """One layer's attention parameters, the same in every step. Compared by identity."""

    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # E
    sliding_window: int | None  # position p sees from p - sliding_window + 1 on; None: from 0 on
    chunk_size: int | None = None  # position p sees nothing before p - p % chunk_size
    norms: HeadNorms | None = None
    norms_behind: bool = False  # the norms are applied to rotated heads; behind pairs, all their weights are equal
    rotary: int | None = 0  # index into `AttentionMetadata.rotary`; None: no rotation
    query_rotary: int | None = None  # the same for queries, where theirs is another table
    rotates_pairs: bool = False  # elements 2 * i and 2 * i + 1 of a head turn by angle i; else i and i + pairs
    scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scaled scores s become soft_cap * tanh(s / soft_cap) before masking
    latent: LatentKV | None = None  # None: each of G kv heads has a key and a value; else there is one, of this kind
    sinks: Tensor | None = None  # [H] float32, one extra softmax logit per head, without a value
    normalizes_values: bool = False  # each head of values, by the epsilon of `norms`, without weights
    # qk: values are keys before norm and rotation; q: keys and values are another layer's, written before.
    projects: Literal["qkv", "qk", "q"] = "qkv"
    gate_heads: int = 0  # behind queries, keys and values in a row of the projection, for others than the backend
    kv_group: int = 0  # which block table and slots to use, see `ForwardBatch.of_group`
    computes_kept_only: bool = False  # only outputs at `ForwardBatch.kept_indices` are read; the rest are undefined
    index: int = 0  # in the model

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise UnsupportedModelError(f"layer {self.index}: soft_cap={self.soft_cap}: must be above 0")
        if self.sinks is not None and (self.sinks.dtype, *self.sinks.shape) != (torch.float32, self.num_heads):
            what = f"{self.sinks.dtype} {list(self.sinks.shape)}"
            raise UnsupportedModelError(f"layer {self.index}: sinks={what}: must be float32 [{self.num_heads}]")

    @property
    def is_turned_otherwise(self) -> bool:
        """Whether heads are not simply normalized, then rotated by halves with one table."""
        return self.norms_behind or self.query_rotary is not None or self.rotates_pairs

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderHeads:
    """One layer's heads on this rank. Compared by identity."""

    count: int  # H
    size: int  # E
    kv_count: int | None = None  # G; None: H
    window: int | None = None  # positions less than so many away are seen, on both sides; None: the whole segment
    norms: HeadNorms | None = None
    scale: float | None = None  # of queries times keys; None: 1 / sqrt(E)

    @property
    def num_kv_heads(self) -> int:
        """Return G."""
        return self.count if self.kv_count is None else self.kv_count


class EncoderSegments:
    """Segments of a step, and their attention: made once, used by all layers that have these segments.

    By torch's own op: the definition. Adjacent segments of one length are computed together.
    """

    def __init__(self, lengths: Sequence[int], rotary: RotaryTable | None) -> None:
        """Take the `lengths` [S], which add up to P, and cos and sin, [P, E / 2] float32 each; None: no rotation."""
        self._lengths, self._rotary = lengths, rotary

    def attend(self, qkv: Tensor, heads: EncoderHeads) -> Tensor:
        """Normalize and rotate queries and keys of qkv [P, (H + 2 * G) * E], attend within each segment: [P, H * E]."""
        counts = [heads.count, heads.num_kv_heads, heads.num_kv_heads]
        query, key, value = qkv.view(len(qkv), -1, heads.size).split_with_sizes(counts, dim=1)
        if heads.norms is not None:
            query = Kernels().rms_norm(query, heads.norms.query, heads.norms.eps)
            key = Kernels().rms_norm(key, heads.norms.key, heads.norms.eps)
        if self._rotary is not None:
            query, key = (Kernels().rotary(x, *self._rotary) for x in (query, key))
        repeats = heads.count // heads.num_kv_heads
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return torch.cat([*self._parts(query, key, value, heads)]).reshape(len(qkv), -1)

    def _parts(self, query: Tensor, key: Tensor, value: Tensor, heads: EncoderHeads) -> Iterator[Tensor]:
        """Yield the attention of each segment, or of adjacent ones of one length: [., H, E]."""
        start = 0
        for length, run in groupby(self._lengths):
            count = sum(1 for _ in run)
            end = start + count * length
            q, k, v = (of[start:end].view(count, length, *of.shape[1:]).transpose(1, 2) for of in (query, key, value))
            mask = None
            if heads.window is not None and heads.window < length:
                places = torch.arange(length, device=q.device)
                mask = (places[:, None] - places).abs() < heads.window
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale)
            yield attended.transpose(1, 2).flatten(0, 1)
            start = end


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
        """Raise an `UnsupportedModelError` if the backend lacks a feature of the layer."""
        asked: dict[AttentionFeature, bool] = {
            "soft_cap": layer.soft_cap is not None,
            "sinks": layer.sinks is not None,
            "value_norm": layer.normalizes_values,
            "kv_sharing": layer.projects != "qkv",
            "latent": layer.latent is not None,
            "chunks": layer.chunk_size is not None,
        }
        if lacking := [name for name, is_asked in asked.items() if is_asked and name not in self.features]:
            what = f"attention_backend={self.name} does not compute {' and '.join(lacking)}"
            raise UnsupportedModelError(f"layer {layer.index}: {what}")

    def forward(
        self,
        qkv: Tensor,  # [T, (H + 2 * G) * E], as projected, or what `AttentionLayer` says; with gates, a part of rows
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
        layer: AttentionLayer,
    ) -> Tensor:  # [T, H * E]
        """Normalize and rotate queries and keys, store keys and values at the step's slots, then attend."""
        return self.attend(self.write_kv(qkv, kv_cache, step, layer), kv_cache, step, layer)

    def forward_latent(
        self,
        query: Tensor,  # [T, H * E], as projected
        vectors: Tensor,  # [T, E], as projected
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
        layer: AttentionLayer,
    ) -> Tensor:  # [T, H * V]
        """Normalize and rotate vectors, rotate queries, store vectors at the step's slots, then attend.

        Only of backends with the feature "latent".
        """
        raise NotImplementedError(f"{self.name} has no latent attention: `check` says so")

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        """Normalize and rotate queries and keys, store keys and values; return queries [T, H, E].

        By default, the projection is returned as is: for backends whose `attend` does everything.
        """
        return qkv

    @abstractmethod
    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        """Return the attention output [T, H * E] of `write_kv`'s queries; [T, H * V] of a latent layer."""

    def of_segments(self, lengths: Sequence[int], rotary: RotaryTable | None) -> EncoderSegments:
        """Return the attention of an encoder's step, by torch's ops where the backend has none of its own.

        `lengths` are those of the segments, one after the other; `rotary` has a row for each of theirs. Nothing is
        stored, so `kv_cache_dtype` changes no bit of it.
        """
        return EncoderSegments(lengths, rotary)


class TorchAttention(AttentionBackend[PlanT]):
    """A backend that stores keys and values unchanged and computes with torch ops."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels, dtype

    def kv_layout(self, head_dim: int) -> KVLayout:
        return KVLayout(head_size=head_dim, dtype=self._dtype)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        if layer.projects == "q":
            return turned_heads(qkv.view(len(qkv), -1, layer.head_dim), "query", step.rotary, layer, self._kernels)
        query, key, value = split_heads(qkv, step.rotary, layer, self._kernels)
        slots = step.batch.of_group(layer.kv_group).slot_mapping
        kv_cache.key.index_copy_(0, slots, key)
        kv_cache.value.index_copy_(0, slots, value)
        return query

    def forward_latent(
        self, query: Tensor, vectors: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer
    ) -> Tensor:
        query, vectors = split_latent(query, vectors, step.rotary, layer, self._kernels)
        kv_cache.key.index_copy_(0, step.batch.of_group(layer.kv_group).slot_mapping, vectors)
        return self.attend(query, kv_cache, step, layer)


def split_heads(
    qkv: Tensor,  # [T, (H + 2 * G) * E], or [T, (H + G) * E]: `AttentionLayer.projects`
    rotary: tuple[RotaryTable, ...],
    layer: AttentionLayer,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [T, H, E] and key [T, G, E], normalized and rotated, and value [T, G, E], normalized if asked."""
    counts = [layer.num_heads, *[layer.num_kv_heads] * (len(layer.projects) - 1)]
    query, key, *rest = qkv.view(len(qkv), -1, layer.head_dim).split_with_sizes(counts, dim=1)
    value = rest[0] if rest else key
    if layer.normalizes_values:
        assert layer.norms is not None, "values are normalized by the epsilon of queries and keys"
        value = kernels.rms_norm(value, torch.ones_like(layer.norms.key), layer.norms.eps)
    query, key = (turned_heads(heads, kind, rotary, layer, kernels) for heads, kind in ((query, "query"), (key, "key")))
    return query, key, value


def turned_heads(
    heads: Tensor,  # [T, H or G, E]
    kind: str,  # query or key
    rotary: tuple[RotaryTable, ...],
    layer: AttentionLayer,
    kernels: Kernels,
) -> Tensor:
    """Return heads of queries or keys, normalized and rotated as the layer says."""

    def normed(heads: Tensor) -> Tensor:
        return heads if layer.norms is None else kernels.rms_norm(heads, getattr(layer.norms, kind), layer.norms.eps)

    heads = heads if layer.norms_behind else normed(heads)
    table = layer.rotary if kind == "key" or layer.query_rotary is None else layer.query_rotary
    if table is not None:
        heads = (kernels.rotary_pairs if layer.rotates_pairs else kernels.rotary)(heads, *rotary[table])
    return normed(heads) if layer.norms_behind else heads


def split_latent(
    query: Tensor,  # [T, H * E]
    vectors: Tensor,  # [T, E]
    rotary: tuple[RotaryTable, ...],
    layer: AttentionLayer,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Return queries [T, H, E] and vectors [T, 1, E]: fronts of vectors normalized, what is behind them rotated."""
    latent = layer.latent
    assert latent is not None, "of layers with a latent vector"
    assert layer.rotary is not None, "vectors have a rotated part"
    front, behind = vectors.split_with_sizes([latent.value_size, vectors.shape[1] - latent.value_size], dim=1)
    normed = kernels.rms_norm(front.contiguous(), latent.norm, latent.eps)
    unrotated = query.view(len(query), layer.num_heads, layer.head_dim)
    rotate = kernels.rotary_pairs if layer.rotates_pairs else kernels.rotary
    both = torch.cat((unrotated[:, :, latent.value_size :], behind.unsqueeze(1)), dim=1)  # [T, H + 1, E - V]
    turned = rotate(both, *rotary[layer.rotary])
    query = torch.cat((unrotated[:, :, : latent.value_size], turned[:, :-1]), dim=2)
    return query, torch.cat((normed.unsqueeze(1), turned[:, -1:]), dim=2)


def context_slots(batch: ForwardBatch, requests: Tensor, length: int) -> Tensor:
    """Return the slots [R, length] of positions 0 ... length - 1 of `requests` [R].

    Positions past a request's context repeat its last one: slots of other requests are never read, so nothing in them,
    not even a NaN, has an effect.
    """
    last = (batch.seq_lens[requests].long() - 1).unsqueeze(1)  # [R, 1]
    positions = torch.arange(length, device=last.device).minimum(last)  # [R, C]
    blocks = batch.block_table[requests].long().gather(1, positions // batch.block_size)  # [R, C]
    return blocks * batch.block_size + positions % batch.block_size
