"""What ranks of one host pay for talking: Octavo's own collectives through shared memory beside Gloo over loopback.

    python -m benchmarks.kernels.collectives [--ranks 2] [--json FILE]

Sizes are those of a step of Qwen3-0.6B in bfloat16: the sum of [T, 1024] behind every branch for 1, 32 and 1,024
tokens, the logits of 1 and 32 rows in float32, rows dealt out to experts. Each rank is a process with one thread.
Medians, in microseconds, of the slowest rank; the two take turns. "GB/s" counts the bytes that one rank cannot do
without: of a sum, its own brought and the whole taken.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from octavo.config.parallel import ParallelConfig, RankPlace, Rendezvous
from octavo.distributed.connect import make_groups
from octavo.distributed.groups import Group

CPU = torch.device("cpu")
HIDDEN, VOCABULARY = 1024, 151_936
ROUNDS, MAX_RUNS, ROUND_S = 7, 200, 0.05


def ops(group: Group) -> dict[str, tuple[Callable[[], object], int]]:
    """Return each op and the bytes that one rank must bring and take."""
    cases: dict[str, tuple[Callable[[], object], int]] = {"barrier": (group.barrier, 0)}
    for rows in (1, 32, 1024):
        x = torch.randn(rows, HIDDEN).bfloat16()
        cases[f"all_reduce [{rows}, {HIDDEN}] bf16"] = (partial(group.all_reduce, x), 2 * x.nbytes)
    sizes = [VOCABULARY // group.size] * group.size
    for rows in (1, 32):
        logits = torch.randn(rows, sizes[0])
        num_bytes = logits.nbytes * (1 + group.size)
        cases[f"all_gather [{rows}, {sum(sizes)}] f32"] = (partial(group.all_gather, logits, sizes), num_bytes)
    for rows in (8, 1024):
        x = torch.randn(rows, HIDDEN).bfloat16()
        counts = [rows // group.size] * group.size
        cases[f"all_to_all [{rows}, {HIDDEN}] bf16"] = (partial(group.all_to_all, x, counts), 2 * x.nbytes)
    return cases


def measure(group: Group, run: Callable[[], object]) -> float:
    """Return seconds per call; all ranks make the same number of calls."""
    group.barrier()
    run()
    start_s = time.perf_counter()
    run()
    took = torch.tensor([[time.perf_counter() - start_s]])
    num_runs = max(3, min(MAX_RUNS, int(ROUND_S / float(group.all_gather(took, [1] * group.size).max()))))
    group.barrier()
    start_s = time.perf_counter()
    for _ in range(num_runs):
        run()
    return (time.perf_counter() - start_s) / num_runs


def run_rank(rank: int, num_ranks: int, files: list[int]) -> None:
    """Measure both kinds of groups in turn; rank 0 prints the slowest rank's medians."""
    torch.set_num_threads(1)
    place = RankPlace.of(rank, ParallelConfig(tensor_parallel_size=num_ranks))
    groups = {
        "shared memory": make_groups(place, Rendezvous(store_fd=files[0], memory_fd=files[1]), CPU).tensor,
        "gloo": make_groups(place, Rendezvous(store_fd=files[2]), CPU).tensor,
    }
    cases = {kind: ops(group) for kind, group in groups.items()}
    rows = []
    for name in cases["gloo"]:
        times: dict[str, list[float]] = {kind: [] for kind in groups}
        for _ in range(ROUNDS):
            for kind, group in groups.items():
                own = torch.tensor([[measure(group, cases[kind][name][0])]])
                times[kind].append(float(group.all_gather(own, [1] * num_ranks).max()))
        rows.append({"op": name, "bytes": cases["gloo"][name][1]} | {k: statistics.median(v) for k, v in times.items()})
    if rank == 0:
        print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.ranks, args.files)
        return
    files = [os.memfd_create(name) for name in ("store", "memory", "gloo-store")]
    command = [sys.executable, "-m", "benchmarks.kernels.collectives", "--ranks", str(args.ranks), "--files"]
    command += [*map(str, files), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], pass_fds=files, stdout=subprocess.PIPE) for rank in range(args.ranks)
    ]
    answer, _ = ranks[0].communicate()
    if any(rank.wait() for rank in ranks):
        sys.exit("a rank failed")
    rows = json.loads(answer)
    print(f"{args.ranks} ranks{'':22} shared memory        gloo   ratio")
    for row in rows:
        own, gloo = row["shared memory"], row["gloo"]
        rate = f"{row['bytes'] / own / 1e9:6.1f} GB/s" if row["bytes"] else ""
        print(f"{row['op']:30} {own * 1e6:10.1f} us {gloo * 1e6:8.1f} us {gloo / own:6.1f}   {rate}")
    if args.json:
        args.json.write_text(json.dumps({"ranks": args.ranks, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
