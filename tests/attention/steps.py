"""Synthetic steps for attention backends, and a float64 reference.

Legend: T = tokens of the step, H = query heads, G = kv heads, D = head size, C = context positions.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from tests.kernels.levels import LEVEL_DTYPES, LEVELS

from octavo.attention.base import AttentionBackend, AttentionLayer, HeadNorms
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.native import NativeAttention
from octavo.attention.selector import select_attention
from octavo.kernels.native import NativeKernels

NATIVE = [f"native-{level}" for level in LEVELS]  # the C++ backend at every level that is tried
NATIVE_DTYPES = [(f"native-{level}", dtype) for level, dtype in LEVEL_DTYPES]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What stays the same in a test."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_blocks: int = 160
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One request's queries, keys and values at all of its positions, and its blocks."""

    query: torch.Tensor  # [C, H, D]
    key: torch.Tensor  # [C, G, D]
    value: torch.Tensor  # [C, G, D]
    block_ids: list[int]

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Return the slots of positions start ... stop - 1."""
        return [self.block_ids[at // block_size] * block_size + at % block_size for at in range(start, stop)]


def make_backend(name: str, dtype: torch.dtype, *, num_threads: int = 2) -> AttentionBackend[Any]:
    """Return the backend that the selector knows by this name, or, as "native-avx2", the C++ one of a level.

    "triton" is that of a GPU, whoever runs its kernels.

    With "+int8" behind it, keys and values are kept as int8.
    """
    level, _, kv_dtype = name.removeprefix("native-").partition("+")
    if level != name:
        kernels = native_kernels_of(level, num_threads, dtype)
        return NativeAttention(kernels, dtype, torch.int8 if kv_dtype == "int8" else dtype)
    if name == "triton":
        from octavo.attention.triton_paged import TritonAttention

        return TritonAttention(dtype)
    return select_attention(torch.device("cpu"), dtype, name)


@cache
def native_kernels_of(level: str, num_threads: int, dtype: torch.dtype) -> NativeKernels:
    """Return the C++ kernels of a level; the same object each time, for it holds threads."""
    return NativeKernels(level, num_threads, dtype)


@lru_cache(maxsize=64)
def _draw(num_heads: int, num_kv_heads: int, head_dim: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values, whole: they are cut, so that a longer request begins like a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2048, count, head_dim, generator=generator) for count in (num_heads, *[num_kv_heads] * 2))


class Pool:
    """A backend, one layer's KV memory for it, rubbish until written, and blocks to give out."""

    def __init__(
        self, backend: str, shape: Shape, *, rubbish: float = 1e4, scattered: bool = True, num_threads: int = 2
    ) -> None:
        self.shape = shape
        self.backend = make_backend(backend, shape.dtype, num_threads=num_threads)
        layout = self.backend.kv_layout(shape.head_dim)
        size = (shape.num_blocks * shape.block_size, shape.num_kv_heads, layout.head_size)
        # As int8, rubbish of all ones: scales of NaN.
        rubbish = -1 if layout.dtype == torch.int8 else rubbish
        self.kv_cache = LayerKVCache(
            key=torch.full(size, rubbish, dtype=layout.dtype), value=torch.full(size, rubbish, dtype=layout.dtype)
        )
        order = torch.randperm(shape.num_blocks, generator=torch.Generator().manual_seed(9)).tolist()
        self._free: list[int] = order if scattered else list(range(shape.num_blocks - 1, -1, -1))

    def sequence(self, length: int, seed: int) -> Sequence:
        """Return a request of `length` positions, the same values for the same seed, in blocks of its own."""
        shape = self.shape
        drawn = _draw(shape.num_heads, shape.num_kv_heads, shape.head_dim, seed)
        query, key, value = (values[:length].to(shape.dtype, copy=True) for values in drawn)
        return Sequence(
            query=query,
            key=key,
            value=value,
            block_ids=[self._free.pop() for _ in range(-(-length // shape.block_size))],
        )


def run_step(
    pool: Pool,
    parts: list[tuple[Sequence, int, int]],
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
    norms: HeadNorms | None = None,
    table: torch.Tensor | None = None,  # [positions, pairs that are rotated], angles
    kept: list[int] | None = None,  # indices of tokens whose outputs count; None: all
    rotates: bool = True,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
    normalizes_values: bool = False,
    projects: Literal["qkv", "qk", "q"] = "qkv",
    visible_ends: torch.Tensor | None = None,  # [positions], behind the last position each sees; None: itself
    norms_behind: bool = False,
    rotates_pairs: bool = False,
    query_growth: torch.Tensor | None = None,  # [positions], factors of queries
    chunk_size: int | None = None,
) -> list[torch.Tensor]:
    """Compute positions start ... stop - 1 of each (sequence, start, stop) in one step; return each one's [., H, D].

    Unless told otherwise without norms, and rotated by nothing: queries, keys and values are attended with as they are.
    """
    shape, batch = pool.shape, make_batch(pool.shape.block_size, parts)
    batch = replace(batch, kept_indices=None if kept is None else torch.tensor(kept))
    if visible_ends is not None:
        batch = replace(batch, visible_ends=visible_ends[batch.positions].int())
    qkv = torch.cat([_project(sequence, projects)[start:stop] for sequence, start, stop in parts])
    angles = torch.zeros(len(qkv), shape.head_dim // 2) if table is None else table[batch.positions]
    others = torch.full_like(angles, torch.nan)  # a table of other layers
    layer = AttentionLayer(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        sliding_window=sliding_window,
        norms=norms,
        scale=scale,
        computes_kept_only=kept is not None,
        soft_cap=soft_cap,
        sinks=sinks,
        rotary=1 if rotates else None,
        normalizes_values=normalizes_values,
        projects=projects,
        norms_behind=norms_behind,
        rotates_pairs=rotates_pairs,
        query_rotary=None if query_growth is None else 2,
        chunk_size=chunk_size,
    )
    growth = 1.0 if query_growth is None else query_growth[batch.positions, None]
    rotary = ((others, others), (angles.cos(), angles.sin()), (angles.cos() * growth, angles.sin() * growth))
    step = AttentionMetadata(batch=batch, plans=(pool.backend.plan(batch),), rotary=rotary)
    out = pool.backend.forward(qkv, pool.kv_cache, step, layer)
    assert out.shape == (len(qkv), shape.num_heads * shape.head_dim)
    assert out.dtype == qkv.dtype
    results = out.view(len(qkv), shape.num_heads, shape.head_dim)
    return list(torch.split(results, [stop - start for _, start, stop in parts]))


def _project(sequence: Sequence, projects: str) -> torch.Tensor:
    """Return the sequence as a layer's projection would give it: [C, (H + 2 * G) * D] for all three parts."""
    parts = {"q": sequence.query, "k": sequence.key, "v": sequence.value}
    return torch.cat([parts[part] for part in projects], dim=1).flatten(1)


def make_batch(block_size: int, parts: list[tuple[Sequence, int, int]]) -> ForwardBatch:
    """Return the step in which each (sequence, start, stop) computes its positions start ... stop - 1."""
    starts = [0, *accumulate(stop - start for _, start, stop in parts)]
    seq_lens = [stop for _, _, stop in parts]
    num_blocks = [-(-length // block_size) for length in seq_lens]
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.tensor([slot for part in parts for slot in part[0].slots(*part[1:], block_size)]),
        block_table=torch.tensor(
            [
                part[0].block_ids[:count] + [0] * (max(num_blocks) - count)
                for part, count in zip(parts, num_blocks, strict=True)
            ],
            dtype=torch.int32,
        ),
        logits_indices=torch.tensor(starts[1:]) - 1,
        block_size=block_size,
        query_start_loc_list=starts,
        seq_lens_list=seq_lens,
    )


def exact_attention(sequence: Sequence, sliding_window: int | None = None, *, start: int = 0) -> torch.Tensor:
    """Return attention at positions from `start` on, [., H, D] in float64, from its definition."""
    repeats = sequence.query.shape[1] // sequence.key.shape[1]
    query = sequence.query[start:].double()
    key, value = (kv.double().repeat_interleave(repeats, dim=1) for kv in (sequence.key, sequence.value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    places = torch.arange(len(key), device=key.device)
    ahead = places[start:].unsqueeze(1) - places  # [., C], how far back a key lies
    hidden = ahead < 0 if sliding_window is None else (ahead < 0) | (ahead >= sliding_window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
