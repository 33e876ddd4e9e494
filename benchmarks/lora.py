"""What adapters cost a decode step: 64 requests of one base, with as many different adapters, or fewer, or none.

    python -m benchmarks.lora [--quantization int8] [--rank 16] [--requests 64] [--turns 7] [--out FILE]

Random weights of Qwen3-0.6B's geometry; adapters on all linears. Ways take turns, and each figure is the median of its
turns. The bound beside a time is that of memory: the bytes of the adapters in use, each read once, at the bandwidth
measured in the same run. Nothing is reused where every request has an adapter of its own: 64 of rank 16 have more bytes
than the base's layers in bfloat16.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.geometry import QWEN3_0_6B, write_checkpoint
from benchmarks.kernels.roofline import read_bandwidth
from octavo.attention.metadata import ForwardBatch
from octavo.config.args import EngineArgs
from octavo.kernels.reference import LoraAdapters
from octavo.layers.linear import MergedLinear
from octavo.worker.graph import StepGraph
from octavo.worker.worker import Worker

CONTEXT, BLOCK_SIZE = 128, 16


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A step's time, in milliseconds."""

    num_adapters: int
    num_requests: int
    step_ms: float
    added_percent: float  # beside the same step without adapters
    adapter_mib: float  # the bytes of the adapters in use
    bound_ms: float  # of reading these once


def make_worker(folder: Path, quantization: str | None, num_slots: int, rank: int, num_requests: int) -> Worker:
    """Load the base with slots for adapters, and record its steps."""
    options: dict[str, Any] = {"quantization": quantization}
    args = EngineArgs(
        model_name=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        **options,
        enable_lora=True,
        max_loras=num_slots,
        max_lora_rank=rank,
        block_size=BLOCK_SIZE,
        max_model_len=2 * CONTEXT,
        max_num_seqs=num_requests,
        num_kv_blocks=num_requests * (CONTEXT // BLOCK_SIZE) + 8,
    )
    worker = Worker(args.resolve())
    worker.load_model()
    worker.initialize_kv_cache([num_requests * (CONTEXT // BLOCK_SIZE) + 8])
    return worker


def fill(worker: Worker, rank: int) -> int:
    """Fill every slot of every linear with random numbers; return the bytes of one adapter."""
    num_bytes = 0
    for slots in adapters_of(worker):
        for tensor in (slots.down, slots.up):
            tensor.copy_(torch.randn(tensor.shape[1:]).mul_(0.01).to(tensor.dtype).expand_as(tensor))
            num_bytes += tensor[0].nbytes
        slots.ranks.fill_(rank)
    return num_bytes


def adapters_of(worker: Worker) -> list[LoraAdapters]:
    """Return the slots of all linears."""
    layers = (layer for layer in worker.model.modules() if isinstance(layer, MergedLinear))
    return [layer.adapters for layer in layers if layer.adapters is not None]


def decode_step(worker: Worker, num_requests: int) -> ForwardBatch:
    """Return a step of one token each, at the end of contexts of their own."""
    per_request = CONTEXT // BLOCK_SIZE
    table = torch.arange(num_requests * per_request).view(num_requests, per_request)
    positions = torch.full((num_requests,), CONTEXT - 1)
    return ForwardBatch(
        input_ids=torch.arange(num_requests) + 5,
        positions=positions,
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), CONTEXT, dtype=torch.int32),
        slot_mapping=table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        block_table=table.to(torch.int32),
        logits_indices=torch.arange(num_requests),
        block_size=BLOCK_SIZE,
        query_start_loc_list=list(range(num_requests + 1)),
        seq_lens_list=[CONTEXT] * num_requests,
    ).shared_by(worker.model.config.kv_groups)


def measure(worker: Worker, num_requests: int, counts: list[int], turns: int) -> dict[int, float]:
    """Return the median milliseconds of a step, layers and greedy tokens, by the number of different adapters."""
    graph, plain = worker.runner.graph, decode_step(worker, num_requests)
    assert isinstance(graph, StepGraph), "steps are not recorded on this machine"
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(1 + turns):  # the first is not counted
        for count in counts:
            batch = replace(plain, adapter_ids=torch.arange(num_requests) % count) if count else plain
            with torch.inference_mode():
                start = time.perf_counter()
                hidden = graph.run(batch, None).hidden
                worker.model.logits_argmax(hidden)
                times[count].append((time.perf_counter() - start) * 1e3)
    return {count: statistics.median(found[1:]) for count, found in times.items()}


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = sorted({0, 1, max(1, args.requests // 8), args.requests})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), QWEN3_0_6B)
        worker = make_worker(checkpoint, args.quantization, args.requests, args.rank, args.requests)
        adapter_bytes, bandwidth = fill(worker, args.rank), read_bandwidth()
        times = measure(worker, args.requests, counts, args.turns)
    costs = [
        Cost(
            num_adapters=count,
            num_requests=args.requests,
            step_ms=times[count],
            added_percent=(times[count] / times[0] - 1) * 100,
            adapter_mib=count * adapter_bytes / 2**20,
            bound_ms=count * adapter_bytes / bandwidth * 1e3,
        )
        for count in counts
    ]
    form = args.quantization or "bfloat16"
    print(f"Qwen3-0.6B geometry in {form}, rank {args.rank}, {args.requests} requests; {bandwidth / 1e9:.1f} GB/s")
    print("adapters   step ms    added   bytes MiB   bound ms")
    for cost in costs:
        added = f"{cost.added_percent:+7.1f}%"
        print(f"{cost.num_adapters:8} {cost.step_ms:9.1f} {added} {cost.adapter_mib:11.0f} {cost.bound_ms:10.1f}")
    if args.out:
        found = {"form": form, "rank": args.rank, "bandwidth": bandwidth, "costs": [asdict(cost) for cost in costs]}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
