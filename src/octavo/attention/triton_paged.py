"""Attention by Octavo's own Triton kernels: norms, rotation and KV memory in one launch, attention in one or two.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, N = items of work,
S = splits, M = tokens of requests with few rows.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer, KVLayout, split_heads, turned_heads
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.attention import attention_kernel, heads_kernel, join_kernel
from octavo.kernels.triton.overlap import compute_capability, overlap
from octavo.kernels.triton.row_ops import aligned

_Items = npt.NDArray[np.int32]
_HEADS = 16  # rows of a program that normalizes, rotates and writes
SPLIT_SIZE = 256  # positions, in exact attention; a row's partial result is at most 1 % of the bytes read for a split
# Of the fast one, largest first: the first that yields enough programs. Eleven for each multiprocessor of an H200.
_SPLIT_SIZES, _ENOUGH_PROGRAMS = (512, 256, 128), 1500
_NEVER = 1 << 30  # a split that no context fills
FEWEST_ROWS = 16  # of a program: what tensor cores multiply at least. Decoding wastes most of them.
MOST_FEW_ROWS = 64  # of a request whose context is split
_FIRST_WITH_LARGE_TILES = (9, 0)  # compute capability: 128 rows by 128 positions need 192 KiB of shared memory


@dataclass(frozen=True, slots=True)
class Tiles:
    """How programs attend: to tiles of `rows` by `positions`, and at most to a split of the context in one go."""

    rows: int
    positions: int
    split: int = SPLIT_SIZE
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRows:
    """Work that is split: requests with few rows, at most one tile or one token."""

    items: Tensor | None  # [N, 3] int32: request, first row, number of its first token among M; None: see below
    tokens: Tensor | None  # [M, 2] int32: token, its request; None: every request has one token
    num_tokens: int  # M
    num_items: int  # N
    longest: int  # context, which decides how many splits there are
    rows: int  # of a program


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

    Exact attention has one size of tiles and splits for everything: the same bits in any batch and for any chunking.
    The fast one takes what is fastest for the step. Measured on an H200: `benchmarks/results/`.

    A step of one token per request reads from the host only the number of requests and splits: a captured launch is
    valid for any such step whose contexts need no more splits.
    """

    is_capturable = True
    features = frozenset({"soft_cap", "sinks", "value_norm", "kv_sharing"})

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, *, is_exact: bool = True) -> None:
        self._kv_dtype, self._is_exact, self._is_float32 = kv_dtype or dtype, is_exact, dtype == torch.float32
        self.is_batch_invariant = is_exact
        self.name = "triton" + "-deterministic" * is_exact + "-fp8-kv" * (self._kv_dtype == torch.float8_e4m3fn)

    def kv_layout(self, head_dim: int) -> KVLayout:
        return KVLayout(head_size=head_dim, dtype=self._kv_dtype)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(batch=batch)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        batch, head_dim = step.batch.of_group(layer.kv_group), layer.head_dim
        if layer.is_turned_otherwise:
            qkv, layer = _turned(qkv, step, layer)
        if layer.projects == "qk":  # the kernel reads values of their own
            qkv = torch.cat((qkv, qkv[:, layer.num_heads * head_dim :]), dim=1)
        width = layer.num_heads + (2 * layer.num_kv_heads if layer.projects != "q" else 0)
        qkv, query = aligned(qkv), qkv.new_empty(len(qkv), layer.num_heads, head_dim)
        cos, sin = (None, None) if layer.rotary is None else map(aligned, step.rotary[layer.rotary])
        half = head_dim // 2 if cos is None else cos.shape[1]
        num_rows = len(qkv) * width
        query_norm, key_norm, eps = None, None, 0.0
        if layer.norms is not None:
            query_norm, key_norm, eps = layer.norms.query, layer.norms.key, layer.norms.eps
        heads_kernel[(triton.cdiv(num_rows, _HEADS),)](
            *(qkv, cos, sin, query_norm, key_norm, batch.slot_mapping, query, kv_cache.key, kv_cache.value),
            *(num_rows, eps),
            WIDTH=width,
            NORMALIZES_VALUES=layer.normalizes_values,
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
            **overlap(),
        )
        return query

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        plan: TritonPlan = step.plans[layer.kv_group]
        batch, group_size = plan.batch, layer.num_heads // layer.num_kv_heads
        tiles = self._tiles_of_many(layer)
        if group_size not in plan.work:
            plan.work[group_size] = assign_programs(batch, group_size, tiles.rows)
        few, many = plan.work[group_size].few, plan.work[group_size].many
        out = torch.empty_like(query)
        if few is not None:
            self._attend_few(query, kv_cache, batch, layer, few, out)
        if many is not None:
            grid = len(many), layer.num_kv_heads, 1
            self._launch(grid, tiles, query, kv_cache, batch, layer, many, (out, None, None, None))
        return out.flatten(1)

    def _attend_few(
        self,
        query: Tensor,  # [T, H, E]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        layer: AttentionLayer,
        few: FewRows,
        out: Tensor,  # [T, H, E]
    ) -> None:
        tiles = self._tiles_of_few(few, layer)
        num_splits = max(1, -(-few.longest // tiles.split))
        shape = few.num_tokens, layer.num_heads, num_splits
        mixed = torch.empty(*shape, layer.head_dim, dtype=torch.float32, device=query.device)
        largest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
        grid, results = (few.num_items, layer.num_kv_heads, num_splits), (None, mixed, largest, total)
        self._launch(grid, tiles, query, kv_cache, batch, layer, few.items, results)
        join_kernel[few.num_tokens, layer.num_heads](
            *(mixed, largest, total, batch.query_start_loc, batch.seq_lens, few.tokens),
            *(layer.sinks, batch.visible_ends, out, num_splits),
            WINDOW=layer.sliding_window or 0,
            H=layer.num_heads,
            E=layer.head_dim,
            E_BLOCK=_e_block(layer.head_dim),
            SPLIT=tiles.split,
            num_warps=1,
            enable_fp_fusion=False,
            **overlap(),
        )

    def _tiles_of_few(self, few: FewRows, layer: AttentionLayer) -> Tiles:
        positions = 32 if self._is_float32 else 64  # three TF32 products need more registers
        num_warps = _num_warps(few.rows, layer.head_dim)
        if self._is_exact:
            return Tiles(few.rows, positions, num_warps=num_warps)
        num_programs = few.num_items * layer.num_kv_heads
        splits = (size for size in _SPLIT_SIZES if num_programs * -(-few.longest // size) >= _ENOUGH_PROGRAMS)
        return Tiles(few.rows, positions, next(splits, _SPLIT_SIZES[-1]), num_warps)

    def _tiles_of_many(self, layer: AttentionLayer) -> Tiles:
        split, num_warps = SPLIT_SIZE if self._is_exact else _NEVER, _num_warps(64, layer.head_dim)
        if self._is_float32:
            return Tiles(32, 32, split)
        is_large = layer.head_dim <= 128 and compute_capability() >= _FIRST_WITH_LARGE_TILES
        if is_large and not self._is_exact:
            return Tiles(128, 128, split, num_warps=8, num_stages=3)
        return Tiles(64, 64, split, num_warps)

    def _launch(
        self,
        grid: tuple[int, int, int],  # items, kv heads, splits
        tiles: Tiles,
        query: Tensor,  # [T, H, E]
        kv_cache: LayerKVCache,
        batch: ForwardBatch,
        layer: AttentionLayer,
        items: Tensor | None,  # [N, 3]; None: see `FewRows.items`
        results: tuple[Tensor | None, ...],  # the output; or per split: weighted values, largest scores, sums
    ) -> None:
        e_block = _e_block(layer.head_dim)
        # From the kernel's scores to fractions of the soft cap, the argument of tanh, and to exponents of 2.
        score_scale = None if layer.soft_cap is None else layer.softmax_scale / layer.soft_cap
        exponent_scale = (layer.softmax_scale if layer.soft_cap is None else layer.soft_cap) * math.log2(math.e)
        attention_kernel[grid](
            *(query, kv_cache.key, kv_cache.value, batch.query_start_loc, batch.seq_lens, batch.block_table, items),
            *(*results, layer.sinks, batch.visible_ends, batch.block_table.stride(0), grid[2]),
            *(exponent_scale, score_scale),
            IS_EXACT=self._is_exact,
            WINDOW=layer.sliding_window or 0,
            H=layer.num_heads,
            G=layer.num_kv_heads,
            E=layer.head_dim,
            B=batch.block_size,
            ROWS=tiles.rows,
            E_BLOCK=e_block,
            TILE=tiles.positions,
            SPLIT=tiles.split,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            enable_fp_fusion=False,
            **overlap(),
        )


def _num_warps(rows: int, head_dim: int) -> int:
    """Return 8 if a program's sums, with those of previous splits, would not fit into the registers of 4 warps."""
    return 8 if rows * _e_block(head_dim) > 64 * 128 else 4


def _e_block(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)  # the minimum for `tl.dot`


def assign_programs(batch: ForwardBatch, group_size: int, rows: int) -> Work:
    """Assign a step with `group_size` query heads per kv head to programs, of some rows where requests have many."""
    num_tokens = np.diff(batch.query_start_loc_list)  # [R]
    if (num_tokens == 1).all():
        few_rows = _rows_of_few(group_size)
        few = FewRows(
            items=None,
            tokens=None,
            num_tokens=len(num_tokens),
            num_items=len(num_tokens) * -(-group_size // few_rows),
            longest=max(batch.seq_lens_list),
            rows=few_rows,
        )
        return Work(few=few, many=None)
    is_few = (num_tokens == 1) | (num_tokens * group_size <= MOST_FEW_ROWS)  # [R]
    few_requests, many_requests = is_few.nonzero()[0], (~is_few).nonzero()[0]
    return Work(
        few=_assign_few(batch, few_requests, group_size) if len(few_requests) else None,
        many=_assign_many(batch, many_requests, group_size, rows) if len(many_requests) else None,
    )


def _turned(qkv: Tensor, step: AttentionMetadata, layer: AttentionLayer) -> tuple[Tensor, AttentionLayer]:
    """Turn heads by torch's ops where the kernel does not; return the projection, and what is left to do with it."""
    if layer.projects == "q":
        heads = [turned_heads(qkv.view(len(qkv), -1, layer.head_dim), "query", step.rotary, layer, Kernels())]
    else:
        heads = [*split_heads(qkv, step.rotary, layer, Kernels())]
    rest = replace(
        layer,
        norms=None,
        norms_behind=False,
        normalizes_values=False,
        rotary=None,
        query_rotary=None,
        rotates_pairs=False,
        projects="q" if layer.projects == "q" else "qkv",
    )
    return torch.cat(heads, dim=1).flatten(1), rest


def _rows_of_few(num_rows: int) -> int:
    """Return the rows of a program for requests of so many; more rows share what is read of the context."""
    return FEWEST_ROWS if num_rows <= FEWEST_ROWS else 2 * FEWEST_ROWS


def _assign_few(batch: ForwardBatch, requests: npt.NDArray[np.int64], group_size: int) -> FewRows:
    starts, device = np.asarray(batch.query_start_loc_list), batch.seq_lens.device
    num_tokens = np.diff(starts)[requests]
    firsts = np.cumsum(num_tokens) - num_tokens  # among M
    owners = np.repeat(requests, num_tokens)  # [M]
    tokens = np.arange(len(owners)) + np.repeat(starts[requests] - firsts, num_tokens)  # [M]
    rows = _rows_of_few(int(num_tokens.max()) * group_size)
    items = _cut(requests, num_tokens * group_size, firsts, rows)
    return FewRows(
        items=torch.from_numpy(items).to(device),
        tokens=torch.from_numpy(np.stack((tokens, owners), axis=1).astype(np.int32)).to(device),
        num_tokens=len(tokens),
        num_items=len(items),
        longest=max(batch.seq_lens_list[request] for request in requests),
        rows=rows,
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
