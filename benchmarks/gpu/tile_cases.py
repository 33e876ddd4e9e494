"""The contests of `benchmarks.gpu.tiles`: sizes, candidates, and how each is called."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import COLD_BYTES
from benchmarks.gpu.tiles import Candidate, Contest
from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.triton_paged import Tiles, TritonAttention
from octavo.kernels.triton import dense, one_row
from octavo.kernels.triton.dense import DenseTiling, dense_linear
from octavo.kernels.triton.one_row import OneRowTiling, one_row_linear
from octavo.kernels.types import SILU, Activation, Fused, PackedLinear

_BYTES_PER_US, _OPERATIONS_PER_US = 4.3e6, 7.6e8  # of an H200, measured
_BLOCK_SIZE, _NEVER = 32, 1 << 30
Run = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and on which device."""

    device: str
    heads: tuple[tuple[int, int], ...]  # query heads, kv heads
    head_dim: int
    decodes: tuple[tuple[int, int], ...]  # R, C
    prompts: tuple[int, ...]  # C
    shapes: dict[str, tuple[int, int, str]]  # N, K, what stands before the linear
    rows: tuple[int, ...]  # T


FULL = Sizes(
    device="cuda",
    heads=((16, 8), (32, 8)),
    head_dim=128,
    decodes=((1, 1024), (1, 8192), (8, 1100), (32, 1100), (256, 1100)),
    prompts=(2048, 8192),
    shapes={
        "0.6b qkv": (4096, 1024, "norm"),
        "0.6b out": (1024, 2048, ""),
        "0.6b gate_up": (6144, 1024, "norm"),
        "0.6b down": (1024, 3072, "activation"),
        "8b qkv": (6144, 4096, "norm"),
        "8b out": (4096, 4096, ""),
        "8b gate_up": (24576, 4096, "norm"),
        "8b down": (4096, 12288, "activation"),
        "0.6b head": (151936, 1024, ""),
    },
    rows=(1, 2, 8, 16, 32, 64, 128, 256, 2048, 8192),
)
DRY = Sizes(
    device="cpu", heads=((4, 2),), head_dim=16, decodes=((2, 40),), prompts=(70,), shapes={"tiny": (70, 64, "norm")},
    rows=(1, 9),
)  # fmt: skip


class _Chosen(TritonAttention):
    """Attention with tiles of choice."""

    def __init__(self, tiles: Tiles, *, is_exact: bool) -> None:
        super().__init__(torch.bfloat16, is_exact=is_exact)
        self._tiles = tiles

    def _tiles_of_few(self, few: Any, layer: AttentionLayer) -> Tiles:
        return replace(self._tiles, rows=few.rows)

    def _tiles_of_many(self, layer: AttentionLayer) -> Tiles:
        return self._tiles


def decode(sizes: Sizes) -> Iterator[Contest]:
    """One token of each request."""
    tiles = [
        Tiles(16, positions, split, num_warps, num_stages)
        for split in (128, 256, 512)
        for positions, num_warps, num_stages in ((64, 4, 2), (64, 2, 3), (128, 4, 2), (32, 2, 2))
    ]
    for num_heads, num_kv_heads in sizes.heads:
        for num_requests, context in sizes.decodes:
            kv_bytes = 4.0 * num_requests * context * num_kv_heads * sizes.head_dim
            make = partial(_attend, sizes, num_heads, num_kv_heads, num_requests, context, 1)
            yield Contest(
                f"decode {num_heads}/{num_kv_heads} R={num_requests} C={context}",
                kv_bytes / _BYTES_PER_US,
                _of_attention(make, tiles, is_exact=False),
            )


def prompt(sizes: Sizes) -> Iterator[Contest]:
    """All tokens of a prompt; exact attention apart."""
    shapes = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2))
    for is_exact, split in ((False, _NEVER), (True, 256)):
        tiles = [Tiles(rows, positions, split, *how) for rows, positions, *how in shapes]
        tiles = [each for each in tiles if each.positions == 64 or not is_exact]
        for num_heads, num_kv_heads in sizes.heads:
            for context in sizes.prompts:
                operations = 2.0 * context**2 * num_heads * sizes.head_dim
                make = partial(_attend, sizes, num_heads, num_kv_heads, 1, context, context)
                yield Contest(
                    f"prompt{', exact' * is_exact} {num_heads}/{num_kv_heads} C={context}",
                    operations / _OPERATIONS_PER_US,
                    _of_attention(make, tiles, is_exact=is_exact),
                    are_equal=is_exact,
                )


def _of_attention(make: Callable[..., Any], tiles: list[Tiles], *, is_exact: bool) -> list[Candidate]:
    chosen = Candidate("chosen", partial(make, TritonAttention(torch.bfloat16, is_exact=is_exact)))
    others = [Candidate(_name_of_tiles(each), partial(make, _Chosen(each, is_exact=is_exact))) for each in tiles]
    return [chosen, *others]


def _name_of_tiles(tiles: Tiles) -> str:
    split = tiles.split if tiles.split < _NEVER else "-"
    return f"{tiles.rows}x{tiles.positions}/{split} w{tiles.num_warps} s{tiles.num_stages}"


def _attend(
    sizes: Sizes,
    num_heads: int,
    num_kv_heads: int,
    num_requests: int,
    context: int,
    num_tokens: int,
    backend: TritonAttention,
) -> Callable[[], Tensor]:
    """Return attention of the last `num_tokens` of each request; blocks are scattered, KV is cold."""
    blocks_each, size = -(-context // _BLOCK_SIZE), sizes.head_dim
    generator = torch.Generator(sizes.device).manual_seed(0)
    shape = num_requests * blocks_each * _BLOCK_SIZE, num_kv_heads, size
    kv_bytes = 4 * num_requests * context * num_kv_heads * size
    num_copies = max(1, min(8, COLD_BYTES // kv_bytes)) if sizes.device == "cuda" else 1
    caches = [LayerKVCache(*(_random(generator, *shape) for _ in range(2))) for _ in range(num_copies)]
    table = torch.randperm(num_requests * blocks_each, generator=generator, device=sizes.device).to(torch.int32)
    starts = [index * num_tokens for index in range(num_requests + 1)]
    nothing = torch.zeros(0, dtype=torch.int64, device=sizes.device)
    batch = ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=sizes.device),
        seq_lens=torch.full((num_requests,), context, dtype=torch.int32, device=sizes.device),
        slot_mapping=nothing,
        block_table=table.view(num_requests, blocks_each),
        logits_indices=nothing,
        block_size=_BLOCK_SIZE,
        query_start_loc_list=starts,
        seq_lens_list=[context] * num_requests,
    )
    step = AttentionMetadata(batch=batch, plans=(backend.plan(batch),), rotary=())
    layer = AttentionLayer(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=size, sliding_window=None)
    query, turns = _random(generator, num_requests * num_tokens, num_heads, size), cycle(caches)
    return lambda: backend.attend(query, next(turns), step, layer)


_TILINGS = {
    8: (DenseTiling(8, 16, 256, 1, 4), DenseTiling(16, 32, 128, 2, 4)),
    16: (DenseTiling(16, 16, 256, 1, 4), DenseTiling(16, 32, 128, 2, 4), DenseTiling(16, 64, 128, 4, 4)),
    32: (
        *(DenseTiling(32, 16, 256, 2, 3), DenseTiling(32, 16, 256, 1, 4), DenseTiling(32, 32, 128, 4, 4)),
        *(DenseTiling(32, 64, 128, 4, 4), DenseTiling(32, 64, 64, 4, 6)),
    ),
    256: (DenseTiling(64, 32, 128, 4, 4), DenseTiling(64, 64, 64, 4, 5), DenseTiling(128, 128, 64, 8, 4)),
    1 << 30: (DenseTiling(128, 128, 64, 8, 4), DenseTiling(256, 128, 64, 8, 3), DenseTiling(64, 256, 64, 4, 4)),
}


def rows(sizes: Sizes) -> Iterator[Contest]:
    """Linears by tiles of every size; and by cuBLAS, whose bits are said."""
    for num_rows in sizes.rows:
        tilings = next(tilings for most, tilings in _TILINGS.items() if num_rows <= most)
        for name, (num_outputs, in_size, _) in sizes.shapes.items():
            weights, x = _weights(sizes, num_outputs, in_size), _x(sizes, num_rows, in_size)
            chosen = dense.tiling_for(num_rows, num_outputs, in_size, torch.bfloat16)

            def make(
                tiling: DenseTiling | None, x: Tensor = x, weights: list[Tensor] = weights
            ) -> Callable[[], Tensor]:
                turns = cycle(weights)
                if tiling is None:
                    return lambda: torch.nn.functional.linear(x, next(turns))
                return lambda: dense_linear(x, next(turns), None, tiling)

            ours = [Candidate(_name(each), partial(make, each)) for each in dict.fromkeys((chosen, *tilings))]
            num_bytes, operations = 2.0 * num_outputs * in_size, 2.0 * num_rows * num_outputs * in_size
            floor_us = max(num_bytes / _BYTES_PER_US, operations / _OPERATIONS_PER_US)
            candidates = [*ours, Candidate("cublas", partial(make, None))]
            yield Contest(f"linear {name} T={num_rows}", floor_us, candidates, are_equal=True)


def one_row_linears(sizes: Sizes) -> Iterator[Contest]:
    """Linears of one row, with what stands before them."""
    tilings = [OneRowTiling(4, 1024, 4), OneRowTiling(4, 2048, 8), OneRowTiling(2, 2048, 4), OneRowTiling(8, 1024, 8)]
    for name, (num_outputs, in_size, before) in sizes.shapes.items():
        weights, x = _weights(sizes, num_outputs, in_size), _x(sizes, 1, in_size * (1 + (before == "activation")))
        packed = [PackedLinear(weight=weight, bias=None, num_outputs=num_outputs) for weight in weights]
        fused = Fused(residual=x, norm_weight=x[0], eps=1e-6) if before == "norm" else None
        activation = SILU if before == "activation" else None
        chosen = one_row.tiling_for(num_outputs, in_size)

        def make(
            tiling: OneRowTiling,
            x: Tensor = x,
            packed: list[PackedLinear] = packed,
            fused: Fused | None = fused,
            activation: Activation | None = activation,
        ) -> Callable[[], Tensor]:
            turns = cycle(packed)
            return lambda: one_row_linear(x, next(turns), fused=fused, activation=activation, tiling=tiling)[0]

        candidates = [Candidate(_name(each), partial(make, each)) for each in dict.fromkeys((chosen, *tilings))]
        yield Contest(f"one row {name}", 2.0 * num_outputs * in_size / _BYTES_PER_US, candidates)


def _name(tiling: DenseTiling | OneRowTiling) -> str:
    sizes = [tiling.outputs, tiling.inputs]
    if isinstance(tiling, DenseTiling):
        return f"{'x'.join(map(str, (tiling.rows, *sizes)))} w{tiling.num_warps} s{tiling.num_stages}"
    return f"{'x'.join(map(str, sizes))} w{tiling.num_warps}"


def _weights(sizes: Sizes, num_outputs: int, in_size: int) -> list[Tensor]:
    generator = torch.Generator(sizes.device).manual_seed(1)
    num_copies = max(2, min(12, COLD_BYTES // (2 * num_outputs * in_size))) if sizes.device == "cuda" else 1
    first = _random(generator, num_outputs, in_size)
    return [first, *(first.clone() for _ in range(num_copies - 1))]


def _x(sizes: Sizes, num_rows: int, size: int) -> Tensor:
    return _random(torch.Generator(sizes.device).manual_seed(2), num_rows, size)


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)


BY_PART: dict[str, Callable[[Sizes], Iterator[Contest]]] = {
    "decode": decode, "prompt": prompt, "rows": rows, "one_row": one_row_linears,
}  # fmt: skip
