"""Attention by Octavo's own Triton kernels: norms, rotation and KV memory in one launch, attention in one or two.

Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, N = items of work,
M = tokens of requests with few rows.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionLayer, KVLayout
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.kernels.triton.attention import (
    SPLIT_SIZE,
    TILING,
    TILING_FLOAT32,
    FewRows,
    PagedContext,
    Softmax,
    Work,
    attend,
)
from octavo.kernels.triton.heads import rotate_and_write

_Items = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonPlan:
    """One step; the first layer with a given ratio of heads assigns the work."""

    batch: ForwardBatch
    context: PagedContext
    work: dict[int, Work] = field(default_factory=dict)  # by query heads per kv head


class TritonAttention(AttentionBackend[TritonPlan]):
    """Keys and values in the model's dtype, or in e4m3, widened when read.

    A step of one token per request reads from the host only the number of requests and splits: a captured launch is
    valid for any such step whose contexts need no more splits.
    """

    is_batch_invariant = True
    is_capturable = True
    features = frozenset({"soft_cap", "sinks"})

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        self._kv_dtype = kv_dtype or dtype
        self._tiling = TILING_FLOAT32 if dtype == torch.float32 else TILING
        self.name = "triton" + ("-fp8-kv" if self._kv_dtype == torch.float8_e4m3fn else "")

    def kv_layout(self, head_dim: int) -> KVLayout:
        return KVLayout(head_size=head_dim, dtype=self._kv_dtype)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        context = PagedContext(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            block_size=batch.block_size,
            visible_ends=batch.visible_ends,
        )
        return TritonPlan(batch=batch, context=context)

    def write_kv(self, qkv: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        batch = step.batch.of_group(layer.kv_group)
        return rotate_and_write(
            qkv,
            None if layer.rotary is None else step.rotary[layer.rotary],
            None if layer.norms is None else (layer.norms.query, layer.norms.key, layer.norms.eps),
            batch.slot_mapping,
            kv_cache.key,
            kv_cache.value,
            num_heads=layer.num_heads,
            block_size=batch.block_size,
        )

    def attend(self, query: Tensor, kv_cache: LayerKVCache, step: AttentionMetadata, layer: AttentionLayer) -> Tensor:
        plan: TritonPlan = step.plans[layer.kv_group]
        group_size = layer.num_heads // layer.num_kv_heads
        if group_size not in plan.work:
            plan.work[group_size] = assign_programs(plan.batch, group_size, self._tiling.num_rows)
        softmax = Softmax(
            scale=layer.softmax_scale, sliding_window=layer.sliding_window, soft_cap=layer.soft_cap, sinks=layer.sinks
        )
        pools = kv_cache.key, kv_cache.value
        return attend(query, pools, plan.context, plan.work[group_size], softmax, self._tiling).flatten(1)


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
