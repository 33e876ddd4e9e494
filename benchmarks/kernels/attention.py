"""Paged attention beside the roofline of this machine: decodes, prompts and chunks, in every form of KV.

    python -m benchmarks.kernels.attention [--threads 2] [--only TEXT ...] [--budget 0.3] [--json FILE]

Heads are Qwen3-0.6B's (16 of queries, 8 of keys and values, of 128) unless a cell says otherwise. KV is taken in turn
from the layers of a pool like the engine's, together 512 MiB, so that it is cold. A decode's roof is KV bytes over
the read bandwidth; a prompt's is the products of queries with keys that they see, and of weights with values, over the
rate of the dtype: both limits of `benchmarks.machine.probe`, measured before and after; the longer time counts. Each
time is the best of many. `OCTAVO_CPU_LEVEL` chooses a lower level. `--only` takes cells whose names hold every TEXT.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cold import num_copies
from benchmarks.kernels.roofline import best_seconds
from benchmarks.machine.probe import Machine, best_of, probe
from octavo.attention.base import AttentionBackend, AttentionLayer
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.selector import select_attention
from octavo.config.engine import KVCacheDType
from octavo.contracts.kv_cache import KVCacheSpec, KVGroup, KVGroupSpec
from octavo.worker.kv_cache import allocate_kv_caches, attention_parts

CPU = torch.device("cpu")
BLOCK_SIZE = 32
NUM_LAYERS = 28
KV_FORMS: tuple[tuple[torch.dtype, KVCacheDType], ...] = (
    (torch.bfloat16, "auto"),
    (torch.bfloat16, "int8"),
    (torch.float32, "auto"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Equal requests that compute the last `num_new` positions of their context."""

    name: str
    num_requests: int = 1
    num_new: int = 1
    context: int
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: KVCacheDType = "auto"
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def num_bytes(self) -> int:
        """Of keys and values, with the scales of int8."""
        head = self.head_dim + 4 if self.kv_cache_dtype == "int8" else self.head_dim * self.dtype.itemsize
        return 2 * self.num_requests * self.context * self.num_kv_heads * head

    @property
    def num_operations(self) -> int:
        """Products and sums of each query and each key that it sees, and of its weight and the value."""
        pairs = self.num_requests * sum(range(self.context - self.num_new + 1, self.context + 1))
        return 4 * pairs * self.num_heads * self.head_dim

    def roof_seconds(self, machine: Machine) -> float:
        rate = machine.float32_per_s if self.dtype == torch.float32 else machine.bf16_per_s
        return max(self.num_bytes / machine.bytes_per_s, self.num_operations / rate)


def cells() -> list[Cell]:
    """Return all of the table: each form of KV, then other head sizes and groups of query heads."""
    decodes = [
        Cell(name=f"decode {requests} x {context}", num_requests=requests, context=context)
        for requests in (1, 8, 32)
        for context in (160, 1024, 8192)
    ]
    prompt = Cell(name="prompt 1024", num_new=1024, context=1024)
    usual = [*decodes, prompt, Cell(name="chunk 512 behind 4096", num_new=512, context=4608)]
    forms = [
        replace(
            cell,
            name=f"{cell.name}, {kv if kv != 'auto' else dtype}".replace("torch.", ""),
            dtype=dtype,
            kv_cache_dtype=kv,
        )
        for dtype, kv in KV_FORMS
        for cell in usual
    ]
    step = Cell(name="decode 32 x 1024", num_requests=32, context=1024)
    others = [
        replace(
            cell,
            name=f"{cell.name}, heads of {head_dim}, groups of {group}",
            num_kv_heads=16 // group,
            head_dim=head_dim,
        )
        for cell in (step, prompt)
        for head_dim, group in ((64, 2), (256, 2), (128, 1), (128, 4), (128, 8))
    ]
    return forms + others


def make_batch(num_requests: int, num_new: int, context: int) -> ForwardBatch:
    """Return a step in which each of R requests computes the last `num_new` positions of its context."""
    num_blocks = -(-context // BLOCK_SIZE)
    block_table = torch.arange(num_requests * num_blocks, dtype=torch.int32).view(num_requests, num_blocks)
    positions = torch.arange(context - num_new, context).repeat(num_requests)  # [T]
    first_slots = block_table[:, 0].long().repeat_interleave(num_new) * BLOCK_SIZE  # [T]
    starts = list(range(0, num_requests * num_new + 1, num_new))
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), context, dtype=torch.int32),
        slot_mapping=first_slots + positions,
        block_table=block_table,
        logits_indices=torch.tensor(starts[1:]) - 1,
        block_size=BLOCK_SIZE,
        query_start_loc_list=starts,
        seq_lens_list=[context] * num_requests,
    )


def attention_run(backend: AttentionBackend[Any], cell: Cell) -> Callable[[], torch.Tensor]:
    """Return a call that computes the cell on the KV of the next layer; requests' blocks are neighbors."""
    batch, layout = make_batch(cell.num_requests, cell.num_new, cell.context), backend.kv_layout(cell.head_dim)
    group = KVGroupSpec(
        group=KVGroup(),
        layers=tuple(range(num_copies(cell.num_bytes))),
        parts=attention_parts(cell.num_kv_heads, layout),
    )
    spec = KVCacheSpec(block_size=BLOCK_SIZE, groups=(group,))
    allocated = allocate_kv_caches(spec, [batch.block_table.numel()], CPU)
    caches = [cache for cache in allocated if isinstance(cache, LayerKVCache)]
    for tensor in chain.from_iterable((cache.key, cache.value) for cache in caches):
        tensor.fill_(1)  # or the system has but one page of zeros, which stays in the caches
    layer = AttentionLayer(
        num_heads=cell.num_heads, num_kv_heads=cell.num_kv_heads, head_dim=cell.head_dim, sliding_window=None
    )
    num_tokens, turns = cell.num_requests * cell.num_new, cycle(caches)
    qkv = torch.randn(num_tokens, (cell.num_heads + 2 * cell.num_kv_heads) * cell.head_dim).to(cell.dtype)
    cos, sin = torch.randn(2, num_tokens, cell.head_dim // 2)
    step = AttentionMetadata(batch=batch, plans=(backend.plan(batch),), rotary=((cos, sin),))
    return lambda: backend.forward(qkv, next(turns), step, layer)


def measure(cell: Cell, budget_s: float) -> float:
    """Return seconds of one layer."""
    backend = select_attention(CPU, cell.dtype, kv_cache_dtype=cell.kv_cache_dtype)
    return best_seconds(attention_run(backend, cell), budget_s=budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each cell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = select_attention(CPU, torch.bfloat16)
    chosen = [cell for cell in cells() if all(text in cell.name for text in options.only)]
    before = probe(options.threads)
    with torch.inference_mode():
        seconds = {cell: measure(cell, options.budget) for cell in chosen}
    machine = best_of(before, probe(options.threads))[options.threads]
    report(seconds, machine, f"{backend.name}, {options.threads} threads", options.json)


def report(seconds: dict[Cell, float], machine: Machine, title: str, file: Path | None) -> None:
    """Print one line for each cell, and write the same as JSON where a file is named."""
    rates = f"{machine.bf16_per_s / 1e12:.2f} T/s in bf16, {machine.float32_per_s / 1e12:.2f} in float32"
    print(f"{title}: reads {machine.bytes_per_s / 1e9:.1f} GB/s, multiplies {rates}")
    print(f"{'':52}{'us':>10}{f'{NUM_LAYERS} layers, ms':>15}{'GB/s':>8}{'T/s':>8}{'of roof':>10}")
    rows = []
    for cell, time_s in seconds.items():
        of_roof = cell.roof_seconds(machine) / time_s
        rows.append({"name": cell.name, "us": time_s * 1e6, "of_roof": of_roof})
        print(f"{cell.name:52}{time_s * 1e6:10.1f}{NUM_LAYERS * time_s * 1e3:15.2f}", end="")
        print(f"{cell.num_bytes / time_s / 1e9:8.1f}{cell.num_operations / time_s / 1e12:8.3f}{of_roof:10.0%}")
    if file:
        file.write_text(json.dumps({"backend": title, "machine": vars(machine), "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
