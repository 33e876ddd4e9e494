"""Attention by Octavo's own C++ kernels: norms, rotation, KV memory and attention in one call. Batch-invariant.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, W = tokens kept after the
last layer's attention, S = spans of rows, or segments of an encoder, N = row blocks, P = rows of all segments. A row is
one query head of one token; a row block is up to 32 rows of one request, computed together for each kv head. Those of a
token alone have up to 16: threads share such blocks where contexts are long.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer, EncoderHeads, EncoderSegments, KVLayout
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache, RotaryTable
from octavo.errors import UnsupportedModelError
from octavo.kernels.native import NativeKernels

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

_HEAD_PADDING = 32  # elements: tiles of keys and values consist of 32 x 32 parts
_INT8_SCALE_SIZE = 4  # bytes, stored with each head of an int8 key or value
_MAX_HEAD_DIM = 576
_MAX_ROTARY_TABLES = 4
_ROWS_PER_BLOCK = 32
_TALL_ROWS = 16  # a block of more rows than this is part of a prompt
_TILE, _MAX_BLOCK = 32, 256  # slots: blocks of encoders consist of whole tiles
_NO_ADDRESS = 0


class NativePlan:
    """One step for the kernels. The first layer completes it; it owns the memory that `step` points to."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self.step: _cpu.AttentionStep | None = None
        self.held: list[object] = []


class NativeAttention(AttentionBackend[NativePlan]):
    """In the dtype of the kernels; keys and values in the same dtype, or int8 with float32 scales."""

    is_batch_invariant = True
    records_calls = True
    features = frozenset({"soft_cap", "sinks", "value_norm", "kv_sharing", "latent", "chunks"})

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        from octavo.kernels.cpu import _cpu

        self._cpu, self._kernels, self._native, self._dtype = _cpu, kernels, kernels.native, dtype
        self._layers: dict[tuple[AttentionLayer, int], _cpu.AttentionLayer] = {}  # by layer and block size
        self._kv_dtype = kv_dtype or dtype
        self.name = f"native-{kernels.native.level}" + ("-int8-kv" if self._kv_dtype == torch.int8 else "")

    def kv_layout(self, head_dim: int) -> KVLayout:
        if head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"head_dim={head_dim}: the C++ attention takes at most {_MAX_HEAD_DIM}; "
                "set OCTAVO_CPU_LEVEL=torch to compute with torch's ops"
            )
        scale_size = _INT8_SCALE_SIZE if self._kv_dtype == torch.int8 else 0
        return KVLayout(head_size=-(-head_dim // _HEAD_PADDING) * _HEAD_PADDING + scale_size, dtype=self._kv_dtype)

    def check(self, layer: AttentionLayer) -> None:
        super().check(layer)
        if max(layer.rotary or 0, layer.query_rotary or 0) >= _MAX_ROTARY_TABLES:
            raise UnsupportedModelError(
                f"layer {layer.index}: attention_backend={self.name} takes at most {_MAX_ROTARY_TABLES} rotary tables"
            )

    def plan(self, batch: ForwardBatch) -> NativePlan:
        return NativePlan(batch)

    def of_segments(self, lengths: Sequence[int], rotary: RotaryTable | None) -> EncoderSegments:
        # A backend of its own: it caches descriptions of layers, and these layers exist only for this step.
        return PagedSegments(NativeAttention(self._kernels, self._dtype), lengths, rotary, self._dtype)

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        """One call does everything, from the projection, of [T, (H + 2 * G) * E] for one of everything."""
        query = query if layer.gate_heads else query.contiguous()  # gates: the start of each row of the projection
        out = self._kernels.empty(len(query), layer.num_heads * layer.head_dim, dtype=self._dtype)
        addresses = (tensor.data_ptr() for tensor in (query, kv_cache.key, kv_cache.value, out))
        self._native.attention(*self._described(step, layer), *addresses)
        return out

    def forward_latent(
        self, query: Tensor, vectors: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer
    ) -> Tensor:
        assert layer.latent is not None, "of layers with a latent vector"
        query, vectors = query.contiguous(), vectors.contiguous()
        out = self._kernels.empty(len(query), layer.num_heads * layer.latent.value_size, dtype=self._dtype)
        addresses = (tensor.data_ptr() for tensor in (query, vectors, kv_cache.key, out))
        self._native.latent_attention(*self._described(step, layer), *addresses)
        return out

    def _described(
        self, step: AttentionMetadata, layer: AttentionLayer
    ) -> tuple["_cpu.AttentionStep", "_cpu.AttentionLayer"]:
        """Return a step and a layer as the kernels know them; made once each."""
        plan: NativePlan = step.plans[layer.kv_group]
        if plan.step is None:
            plan.step = self.make_step(plan, step.rotary, layer.num_heads // layer.num_kv_heads)
        key = layer, step.batch.block_size
        if key not in self._layers:
            self._layers[key] = self._make_layer(*key)
        return plan.step, self._layers[key]

    def make_step(self, plan: NativePlan, rotary: tuple[RotaryTable, ...], group_size: int) -> "_cpu.AttentionStep":
        """Return the kernels' description of a step with `group_size` query heads per kv head.

        The memory it points to lives as long as the plan.
        """
        batch, num_tokens = plan.batch, len(plan.batch.positions)
        all_blocks = kept_blocks = cut_into_row_blocks(batch, group_size)  # [N, 3]
        kept = batch.kept_indices
        if kept is not None:
            kept_blocks = cut_into_row_blocks(batch, group_size, kept.numpy())
        rotary = tuple((cos.contiguous(), sin.contiguous()) for cos, sin in rotary)
        table = batch.block_table.contiguous()
        plan.held += [all_blocks, kept_blocks, kept, rotary, table]
        return self._cpu.AttentionStep(
            num_tokens=num_tokens,
            num_kept=num_tokens if kept is None else len(kept),
            num_blocks_per_request=table.shape[1],
            rotary_tables=[self._cpu.RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in rotary],
            slots=batch.slot_mapping.data_ptr(),
            query_start_loc=batch.query_start_loc.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_table=table.data_ptr(),
            kept=_NO_ADDRESS if kept is None else kept.data_ptr(),
            visible_ends=_NO_ADDRESS if batch.visible_ends is None else batch.visible_ends.data_ptr(),
            all_blocks=self._cpu.RowBlocks(len(all_blocks), all_blocks.ctypes.data),
            kept_blocks=self._cpu.RowBlocks(len(kept_blocks), kept_blocks.ctypes.data),
        )

    def _make_layer(self, layer: AttentionLayer, block_size: int) -> "_cpu.AttentionLayer":
        norms, latent = layer.norms, layer.latent
        rotary = -1 if layer.rotary is None else layer.rotary
        key_norm = latent.norm if latent else norms.key if norms else None
        return self._cpu.AttentionLayer(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=block_size,
            sliding_window=layer.sliding_window or 0,
            query_norm=norms.query.data_ptr() if norms else _NO_ADDRESS,
            key_norm=_NO_ADDRESS if key_norm is None else key_norm.data_ptr(),
            sinks=layer.sinks.data_ptr() if layer.sinks is not None else _NO_ADDRESS,
            norm_eps=latent.eps if latent else norms.eps if norms else 0.0,
            scale=layer.softmax_scale,
            soft_cap=layer.soft_cap or 0.0,
            rotary=rotary,
            has_int8_kv=self._kv_dtype == torch.int8,
            computes_kept_only=layer.computes_kept_only,
            kv_group=layer.kv_group,
            normalizes_values=layer.normalizes_values,
            num_parts=1 if latent else len(layer.projects),
            gate_heads=layer.gate_heads,
            latent_size=latent.value_size if latent else 0,
            rotates_pairs=layer.rotates_pairs,
            norms_behind=layer.norms_behind,
            query_rotary=rotary if layer.query_rotary is None else layer.query_rotary,
            chunk_size=layer.chunk_size or 0,
        )


def cut_into_row_blocks(
    batch: ForwardBatch, group_size: int, kept: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int32]:
    """Return [N, 3] of request, first row and number of rows: tall blocks first, then by longest context.

    Of all tokens, or of those at `kept` [W]. What is cut is a span: a request, or one kept token.
    """
    num_requests = len(batch.seq_lens_list)
    if kept is None and batch.query_start_loc_list[-1] == num_requests and group_size <= _TALL_ROWS:
        blocks = np.zeros((num_requests, 3), dtype=np.int32)  # one token each: as below, with fewer ops
        blocks[:, 0] = np.argsort([-length for length in batch.seq_lens_list], kind="stable")
        blocks[:, 2] = group_size
        return blocks
    starts = np.asarray(batch.query_start_loc_list)
    num_rows = np.diff(starts) * group_size  # [R]
    if kept is None:
        request_of, first_rows, sizes = np.arange(len(num_rows)), np.zeros_like(num_rows), num_rows  # [S] each
    else:
        request_of = np.searchsorted(starts, kept, side="right") - 1
        first_rows, sizes = (kept - starts[request_of]) * group_size, np.full(len(kept), group_size)
    most = np.where(sizes > group_size, _ROWS_PER_BLOCK, _TALL_ROWS)  # [S]
    counts = -(-sizes // most)  # [S]
    spans = np.repeat(np.arange(len(counts)), counts)  # [N]
    within = (np.arange(len(spans)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[spans]  # [N]
    requests, rows = request_of[spans], first_rows[spans] + within
    heights = np.minimum(most[spans], sizes[spans] - within)
    unseen = (num_rows[requests] - rows - heights) // group_size  # [N] tokens after the block's last
    order = np.lexsort((unseen - np.asarray(batch.seq_lens_list)[requests], heights <= _TALL_ROWS))
    return np.stack((requests, rows, heights), axis=1)[order].astype(np.int32)


class PagedSegments(EncoderSegments):
    """Each segment is a prompt whose tokens attend to each other. One call computes all of them, whatever their
    lengths.

    It keeps nothing after a step.
    """

    def __init__(
        self, backend: NativeAttention, lengths: Sequence[int], rotary: RotaryTable | None, dtype: torch.dtype
    ) -> None:
        super().__init__(lengths, rotary)
        self._backend, self._dtype, self._batch = backend, dtype, _batch_of(list(lengths))
        self._steps: dict[int | None, AttentionMetadata] = {}  # by window
        self._layers: dict[EncoderHeads, AttentionLayer] = {}
        self._memory: dict[tuple[int, int], LayerKVCache] = {}  # by heads and their size: one layer after another

    def attend(self, qkv: Tensor, heads: EncoderHeads) -> Tensor:
        size = heads.num_kv_heads, heads.size
        if size not in self._memory:
            self._memory[size] = self._make_memory(*size)
        if heads.window not in self._steps:
            self._steps[heads.window] = self._make_step(heads.window)
        if heads not in self._layers:
            self._layers[heads] = AttentionLayer(
                num_heads=heads.count,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.size,
                sliding_window=heads.window,
                norms=heads.norms,
                rotary=None if self._rotary is None else 0,
                scale=heads.scale,
            )
        return self._backend.forward(qkv, self._memory[size], self._steps[heads.window], self._layers[heads])

    def _make_step(self, window: int | None) -> AttentionMetadata:
        batch = self._batch
        assert batch.visible_ends is not None, "tokens see what is behind them"
        if window is not None:
            ends = batch.visible_ends.minimum(batch.positions.to(torch.int32) + window)
            batch = replace(batch, visible_ends=ends)
        tables = () if self._rotary is None else (self._rotary,)
        return AttentionMetadata(batch=batch, plans=(self._backend.plan(batch),), rotary=tables)

    def _make_memory(self, num_kv_heads: int, head_size: int) -> LayerKVCache:
        num_slots = (int(self._batch.block_table.max()) + 1) * self._batch.block_size
        shape = num_slots, num_kv_heads, self._backend.kv_layout(head_size).head_size
        return LayerKVCache(torch.zeros(shape, dtype=self._dtype), torch.zeros(shape, dtype=self._dtype))


def _batch_of(lengths: list[int]) -> ForwardBatch:
    """Return a step of S requests, new ones, whose tokens see their whole prompt."""
    block_size = min(_MAX_BLOCK, -(-max(lengths) // _TILE) * _TILE)
    bounds = [0, *accumulate(-(-length // block_size) for length in lengths)]
    block_ids = [list(range(*span)) for span in pairwise(bounds)]
    nothing = [[0] * length for length in lengths]  # token ids are not read
    batch = ForwardBatch.of_sequences(nothing, [0] * len(lengths), block_ids, block_size, ())
    return replace(batch, visible_ends=batch.seq_lens.repeat_interleave(batch.seq_lens))
