"""Octavo beside a process that never rests, on one of the cores it has: what is left of its tokens per second.

    python -m benchmarks.offline.neighbor [--cells decode:1 decode:8 decode:32 prefill:1024] [--repeats 3]
        [--quantization int8]

Cells and weights are those of `benchmarks.offline.compare`. One engine; each cell alone and with the neighbor in turn,
`--repeats` times; medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.geometry import QWEN3_0_6B, write_checkpoint
from benchmarks.offline.compare import load_octavo, measure
from octavo.kernels.quantization import QUANTIZATIONS

SPIN = "while True: pass"


@contextmanager
def neighbor(core: int) -> Iterator[None]:
    """Keep a core busy meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    os.sched_setaffinity(process.pid, {core})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["decode:1", "decode:8", "decode:32", "prefill:1024"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", choices=tuple(QUANTIZATIONS), help="of the weights")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        generate = load_octavo(write_checkpoint(Path(folder) / "qwen3-0.6b", QWEN3_0_6B), args.quantization)
        alone: dict[str, list[float]] = {cell: [] for cell in args.cells}
        alongside: dict[str, list[float]] = {cell: [] for cell in args.cells}
        for _ in range(args.repeats):
            for cell in args.cells:
                alone[cell].append(measure([cell], generate)[cell])
                with neighbor(cores[0]):
                    alongside[cell].append(measure([cell], generate)[cell])
    print(
        f"| cell, {len(cores)} cores | alone, tok/s | with a neighbor, tok/s | left |",
        "| --- | --- | --- | --- |",
        sep="\n",
    )
    for cell in args.cells:
        before, after = statistics.median(alone[cell]), statistics.median(alongside[cell])
        print(f"| {cell} | {before:.1f} | {after:.1f} | {after / before:.0%} |")


if __name__ == "__main__":
    main()
