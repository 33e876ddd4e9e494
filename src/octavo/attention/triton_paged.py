"""Attention by Octavo's own Triton kernels: norms, rotation and KV memory in one launch, attention in one or two.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, N = items of work,
S = splits, M = tokens of requests with few rows.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer, KVLayout
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.kernels.triton.attention import SPLIT_SIZE, attention_kernel, heads_kernel, join_kernel
from octavo.kernels.triton.row_ops import aligned

_Items = npt.NDArray[np.int32]
_HEADS = 16  # rows of a program that normalizes, rotates and writes
# Rows of a program that attends, and positions of a tile. 64 rows fill an instruction of Hopper's tensor cores.
# Decoding wastes most of them: 64 operations per byte, of the 184 that an H200 can do for each byte it reads.
TILE, TILE_FLOAT32 = 64, 32  # in float32 less: three TF32 products need more registers


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRows:
    """Work that is split: requests with few rows, at most one tile or one token."""

    items: Tensor | None  # [N, 3] int32: request, first row, number of its first token among M; None: see below
    tokens: Tensor | None  # [M, 2] int32: token, its request; None: every request has one token
    num_tokens: int  # M
    num_items: int  # N
    num_splits: int  # S, at least what the longest context needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A step's work, assigned to programs."""

    few: FewRows | None
    many: Tensor | None  # [N, 3] int32: request, first row, unused


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonPlan:
    """One step; the first layer with a given ratio of heads assigns the work."""

    batch: ForwardBatch
    work: dict[int, Work] = field(default_factory=dict)  # by query heads per kv head


class TritonAttention(AttentionBackend[TritonPlan]):
    """Keys and values in the model's dtype, or in e4m3, widened when read; arranged as `kv_place` says.

    A step of one token per request reads from the host only the number of requests and splits: a captured launch is
    valid for any such step whose contexts need no more splits.
    """

    is_batch_invariant = True
    is_capturable = True
    features = frozenset({"soft_cap", "sinks"})

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        self._kv_dtype = kv_dtype or dtype
        self._tile = TILE_FLOAT32 if dtype == torch.float32 else TILE
        self.name = "triton" + ("-fp8-kv" if self._kv_dtype == torch.float8_e4m3fn else "")

    def kv_layout(self, head_dim: int) -> KVLayout:
        return KVLayout(head_size=head_dim, dtype=self._kv_dtype)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(batch=batch)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        batch, head_dim = step.batch.of_group(layer.kv_group), layer.head_dim
        qkv, query = aligned(qkv), qkv.new_empty(len(qkv), layer.num_heads, head_dim)
        cos, sin = (None, None) if layer.rotary is None else map(aligned, step.rotary[layer.rotary])
        half = head_dim // 2 if cos is None else cos.shape[1]
        num_rows = len(qkv) * (layer.num_heads + 2 * layer.num_kv_heads)
        query_norm, key_norm, eps = None, None, 0.0
        if layer.norms is not None:
            query_norm, key_norm, eps = layer.norms.query, layer.norms.key, layer.norms.eps
        heads_kernel[(triton.cdiv(num_rows, _HEADS),)](
            *(qkv, cos, sin, query_norm, key_norm, batch.slot_mapping, query, kv_cache.key, kv_cache.value),
            *(num_rows, eps),
            H=layer.num_heads,
            G=layer.num_kv_heads,
            E=head_dim,
            B=batch.block_size,
            ROWS=_HEADS,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return query

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        plan: TritonPlan = step.plans[layer.kv_group]
        batch, group_size = plan.batch, layer.num_heads // layer.num_kv_heads
        if group_size not in plan.work:
            plan.work[group_size] = assign_programs(batch, group_size, self._tile)
        few, many = plan.work[group_size].few, plan.work[group_size].many
        out = torch.empty_like(query)
        if few is not None:
            shape = few.num_tokens, layer.num_heads, few.num_splits
            mixed = torch.empty(*shape, layer.head_dim, dtype=torch.float32, device=query.device)
            largest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
            grid, results = (few.num_items, layer.num_kv_heads, few.num_splits), (None, mixed, largest, total)
            self._launch(grid, query, kv_cache, batch, layer, few.items, results)
            join_kernel[few.num_tokens, layer.num_heads](
                *(mixed, largest, total, batch.query_start_loc, batch.seq_lens, few.tokens),
                *(layer.sinks, batch.visible_ends, out, few.num_splits),
                WINDOW=layer.sliding_window or 0,
                H=layer.num_heads,
                E=layer.head_dim,
                E_BLOCK=_e_block(layer.head_dim),
                SPLIT=SPLIT_SIZE,
                num_warps=1,
                enable_fp_fusion=False,
            )
        if many is not None:
            grid = len(many), layer.num_kv_heads, 1
            self._launch(grid, query, kv_cache, batch, layer, many, (out, None, None, None))
        return out.flatten(1)

    def _launch(
        self,
        grid: tuple[int, int, int],  # items, kv heads, splits
        query: Tensor,  # [T, H, E]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        layer: AttentionLayer,
        items: Tensor | None,  # [N, 3]; None: see `FewRows.items`
        results: tuple[Tensor | None, ...],  # the output; or per split: weighted values, largest scores, sums
    ) -> None:
        tile, e_block = self._tile, _e_block(layer.head_dim)
        # From the kernel's scores to fractions of the soft cap, the argument of tanh, and to exponents of 2.
        score_scale = None if layer.soft_cap is None else layer.softmax_scale / layer.soft_cap
        exponent_scale = (layer.softmax_scale if layer.soft_cap is None else layer.soft_cap) * math.log2(math.e)
        attention_kernel[grid](
            *(query, kv_cache.key, kv_cache.value, batch.query_start_loc, batch.seq_lens, batch.block_table, items),
            *(*results, layer.sinks, batch.visible_ends, batch.block_table.stride(0), grid[2]),
            *(exponent_scale, score_scale),
            WINDOW=layer.sliding_window or 0,
            H=layer.num_heads,
            G=layer.num_kv_heads,
            E=layer.head_dim,
            B=batch.block_size,
            ROWS=tile,
            E_BLOCK=e_block,
            TILE=tile,
            SPLIT=SPLIT_SIZE,
            # 8 if a program's sums, with those of previous splits, would not fit into registers
            num_warps=8 if tile * e_block > 64 * 128 else 4,
            num_stages=2,
            enable_fp_fusion=False,
        )


def _e_block(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)  # the minimum for `tl.dot`


def assign_programs(batch: ForwardBatch, group_size: int, rows: int) -> Work:
    """Assign a step with `group_size` query heads per kv head to programs of some rows. Requests with few are split."""
    num_tokens = np.diff(batch.query_start_loc_list)  # [R]
    if (num_tokens == 1).all():
        few = FewRows(
            items=None,
            tokens=None,
            num_tokens=len(num_tokens),
            num_items=len(num_tokens) * -(-group_size // rows),
            num_splits=num_splits(max(batch.seq_lens_list)),
        )
        return Work(few=few, many=None)
    is_few = (num_tokens == 1) | (num_tokens * group_size <= rows)  # [R]
    few_requests, many_requests = is_few.nonzero()[0], (~is_few).nonzero()[0]
    return Work(
        few=_assign_few(batch, few_requests, group_size, rows) if len(few_requests) else None,
        many=_assign_many(batch, many_requests, group_size, rows) if len(many_requests) else None,
    )


def num_splits(seq_len: int) -> int:
    """Return the number of splits for a context of this length, at least one."""
    return max(1, -(-seq_len // SPLIT_SIZE))


def _assign_few(batch: ForwardBatch, requests: npt.NDArray[np.int64], group_size: int, rows: int) -> FewRows:
    starts, device = np.asarray(batch.query_start_loc_list), batch.seq_lens.device
    num_tokens = np.diff(starts)[requests]
    firsts = np.cumsum(num_tokens) - num_tokens  # among M
    owners = np.repeat(requests, num_tokens)  # [M]
    tokens = np.arange(len(owners)) + np.repeat(starts[requests] - firsts, num_tokens)  # [M]
    items = _cut(requests, num_tokens * group_size, firsts, rows)
    return FewRows(
        items=torch.from_numpy(items).to(device),
        tokens=torch.from_numpy(np.stack((tokens, owners), axis=1).astype(np.int32)).to(device),
        num_tokens=len(tokens),
        num_items=len(items),
        num_splits=num_splits(max(batch.seq_lens_list[request] for request in requests)),
    )


def _assign_many(batch: ForwardBatch, requests: npt.NDArray[np.int64], group_size: int, rows: int) -> Tensor:
    """Return items [N, 3], longest contexts first: long-running programs should start early."""
    num_tokens = np.diff(batch.query_start_loc_list)[requests]
    items = _cut(requests, num_tokens * group_size, np.zeros_like(requests), rows)
    firsts = np.asarray(batch.seq_lens_list) - np.diff(batch.query_start_loc_list)  # [R], positions
    lengths = firsts[items[:, 0]] + items[:, 1] // group_size
    return torch.from_numpy(items[np.argsort(-lengths, kind="stable")]).to(batch.seq_lens.device)


def _cut(
    requests: npt.NDArray[np.int64], num_rows: npt.NDArray[np.int64], parts: npt.NDArray[np.int64], size: int
) -> _Items:
    """Return [N, 3] of request, first row and part: each request's rows, in chunks of `size`."""
    counts = -(-num_rows // size)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # [N], in its request
    columns = np.repeat(requests, counts), within * size, np.repeat(parts, counts)
    return np.stack(columns, axis=1).astype(np.int32)
